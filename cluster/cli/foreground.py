"""`tandem up`: a cluster that lives until this process is asked to stop."""

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from tandem.cluster.cli.runtime_dir import ClusterLock
from tandem.cluster.config import ClusterConfig
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.island import LoadState
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.start_clock import phase_lines, process_age


def run_cluster(config: ClusterConfig, ray_address: str | None) -> None:
    """Starts the cluster, prints `ready grpc=HOST:PORT`, and returns after SIGINT or SIGTERM. It leaves nothing behind.

    ` http=HOST:PORT` and ` metrics=HOST:PORT` follow on that line if there are such servers. Then stderr gets a line
    for each phase of the start, the address of the Ray, and later each loss and recovery.
    Raises ClusterRunning, ConfigError, StartFailed, WorkerLost.
    """
    age = process_age()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tandem").setLevel(logging.INFO)
    with ClusterLock(config.name) as lock, _signals_interrupt():
        processes = RayProcesses(ray_address)
        cluster = Cluster(config, processes)
        try:
            with _Loading() as loading:
                address = cluster.start(loading.show)
            seconds = {"command, imports": age} | cluster.clock.seconds
            lock.publish(address, seconds)
            others = {"http": cluster.http_address, "metrics": cluster.metrics_address}
            opened = "".join(f" {name}={there}" for name, there in others.items() if there is not None)
            print(f"ready grpc={address}{opened}", flush=True)
            print(*phase_lines(seconds), f"on the Ray at {processes.address}", sep="\n", file=sys.stderr, flush=True)
            cluster.wait()
        except KeyboardInterrupt:
            pass
        finally:
            cluster.stop()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt. Later ones are ignored."""
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Loading:
    """On a terminal a bar for each worker, with the phase of its start; elsewhere nothing."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_Loading":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, states: Sequence[LoadState]) -> None:
        for name, phase, done, total in states:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None)
            text = f"{name}: {phase}" if phase else name
            self._progress.update(self._tasks[name], description=text, completed=done, total=total or None)
