"""`tandem up`: a cluster that lives until this process is asked to stop.

What can be checked without torch and Ray is checked before they are imported, which takes seconds.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType

from tandem.cluster.cli.preflight import check_host, check_ray
from tandem.cluster.cli.runtime_dir import ClusterLock
from tandem.cluster.cli.service_manager import ServiceManager
from tandem.cluster.cli.start_report import StartReport
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.processes.forks.actor_server import set_title
from tandem.cluster.supervision.forking import fork_beside
from tandem.cluster.supervision.offer import Offer
from tandem.cluster.supervision.predecessor import Predecessor
from tandem.cluster.supervision.start_clock import StartClock, phase_lines, process_age
from tandem.workers.logs import formatter

NEW = "+new"  # behind the name of a cluster that replaces one; no name of a cluster has a +
OLD_SECONDS = 60.0  # from the old cluster's end until it gives up its claim of the name


def run_cluster(config: ClusterConfig, ray_address: str | None, *, replace: bool = False) -> None:
    """Starts the cluster, prints `ready grpc=HOST:PORT`, and returns after SIGINT or SIGTERM. It leaves nothing behind.

    ` http=HOST:PORT` and ` metrics=HOST:PORT` follow on that line if there are such servers. Where several hosts have
    gateways, a comma stands between their addresses. stderr gets a line as each phase of the start begins, then the
    phases' seconds, the Ray's address and the folder of logs. Later it gets each loss and recovery. If a service
    manager has started this process (sd_notify), it hears of phases, of ready and of the end.
    replace: a running cluster of that name ends once this one serves in its place, or serves on where this one fails.
    Raises ClusterRunning, ClusterNotRunning, ConfigError, StartFailed, WorkerLost.
    """
    set_title(f"{config.name}/launcher")
    written = logging.StreamHandler()
    written.setFormatter(formatter(config.logging.settings, f"{config.name}/launcher"))
    logging.basicConfig(handlers=[written])
    logging.getLogger("tandem").setLevel(logging.INFO)
    with (
        closing(ServiceManager.from_environ(os.environ)) as manager,
        StartReport(config.name, manager.status) as report,
        suppress(KeyboardInterrupt),
        _signals_interrupt(),
    ):
        clock = StartClock(report.phase)
        clock.seconds["command"] = process_age()
        with ExitStack() as held:
            predecessor = held.enter_context(Predecessor(config.name)) if replace else None
            if predecessor is not None:
                config = predecessor.with_ports(config)
                report.line(f"replaces the running cluster {config.name} ({predecessor.words})")
            beside = frozenset[int]() if predecessor is None else predecessor.ports
            lock = held.enter_context(ClusterLock(f"{config.name}{'' if predecessor is None else NEW}"))
            with clock.phase("host"):
                check_ray(ray_address)
                for warning in check_host(config, own_ray=ray_address is None, beside=beside):
                    report.line(warning)
            _serve(config, ray_address, lock, report, clock, predecessor, manager)


def _serve(
    config: ClusterConfig,
    ray_address: str | None,
    lock: ClusterLock,
    report: StartReport,
    clock: StartClock,
    predecessor: Predecessor | None,
    manager: ServiceManager,
) -> None:
    with clock.phase("imports"):
        gc.disable()  # all that is imported stays
        forks = fork_beside(config)
        from tandem.cluster.cli.kernels.once_a_host import build_beside
        from tandem.cluster.processes.ray_processes import RayProcesses
        from tandem.cluster.supervision.launcher import Cluster

        gc.enable()
        gc.freeze()
        processes = RayProcesses(ray_address, beside=predecessor is not None, forks=forks)
        cluster = Cluster(config, processes, clock, predecessor)
    offer: Offer | None = None
    try:
        cluster.start(report.show, lambda: build_beside(config, report.line))
        report.stop()
        if predecessor is not None:
            lock.rename(config.name, OLD_SECONDS)
        grpc, *others = zip(*((one.grpc, one.http, one.metrics) for one in cluster.addresses), strict=True)
        logs = processes.log_folder(config.logging.folder)
        lock.publish(",".join(grpc), clock.seconds, logs)
        opened = "".join(
            f" {name}={','.join(there)}" for name, there in zip(("http", "metrics"), others, strict=True) if all(there)
        )
        print(f"ready grpc={','.join(grpc)}{opened}", flush=True)
        where = f"on the Ray at {processes.address}", f"logs in {logs}"
        print(*phase_lines(clock.seconds), *where, sep="\n", file=sys.stderr, flush=True)
        manager.ready(f"serves at {', '.join(grpc)}", lambda: cluster.is_supervised)
        offer = Offer(config.name, cluster)
        cluster.wait()
    finally:
        manager.stopping()
        cluster.stop()
        lock.release()
        if offer is not None:
            offer.close()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Makes the first SIGINT or SIGTERM raise KeyboardInterrupt. Later ones are ignored."""
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            with suppress(OSError):  # stderr may be closed; print() could be interrupted in itself
                os.write(2, f"tandem: {signal.Signals(number).name}: stopping\n".encode())
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
