"""Processes that Ray places and watches. The only user of ray."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.errors import ClusterRunning, ProcessEnded, StartFailed
from tandem.cluster.processes import ActorProcess, ActorSpec, Processes, ProcessGroup

NAMESPACE = "tandem"
CPU_SHARE = 0.1  # Ray's unit of accounting; what a worker may really use is its number of threads
PLACEMENT_SECONDS = 30
CALLS_AT_A_TIME = 4
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through Ray's object store


class RayProcesses(Processes):
    """Starts a local Ray, or joins the one at `address` (or that this process is connected to already)."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._owns_ray = False

    def start(self, cluster: str, num_cpus: int | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            self._connect(num_cpus)
        # Names end with an epoch: a cluster that has restarted something would not clash with a second one by itself.
        if any(name.startswith(f"{cluster}/") for name in ray.util.list_named_actors()):
            raise ClusterRunning(cluster, None, None)

    def start_group(self, specs: Sequence[ActorSpec], *, gpus: int, threads: int) -> "RayGroup":
        bundle = {"CPU": CPU_SHARE, "GPU": gpus} if gpus else {"CPU": CPU_SHARE}
        placed = placement_group([bundle] * len(specs), strategy="STRICT_PACK")
        if not placed.wait(PLACEMENT_SECONDS):
            remove_placement_group(placed)
            needed = f"{CPU_SHARE * len(specs):.1f} CPUs" + (f" and {gpus * len(specs)} GPUs" if gpus else "")
            raise StartFailed(f"Ray has no node with {needed} free")
        group = RayGroup(placed)
        try:
            for index, spec in enumerate(specs):
                group.add(spec, index, gpus, threads)
        except BaseException:
            group.end()
            raise
        return group

    def stop(self) -> None:
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _connect(self, num_cpus: int | None) -> None:
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        if self._address is None:
            options |= {
                "num_cpus": num_cpus or os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options["address"] = self._address
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = "a local Ray" if self._address is None else f"the Ray at {self._address!r}"
            raise StartFailed(f"{where} cannot be reached: {str(error).splitlines()[0]}") from error
        self._owns_ray = True
        token = Path.home() / ".ray" / "auth_token"
        with suppress(OSError):
            token.chmod(0o600)  # Ray leaves its token readable for everybody


class RayGroup(ProcessGroup):
    """Actors of one placement group, a bundle each."""

    def __init__(self, placed: PlacementGroup) -> None:
        self._placed: PlacementGroup | None = placed
        self._members: list[RayActor] = []

    @property
    def members(self) -> list["RayActor"]:
        return self._members

    def add(self, spec: ActorSpec, index: int, gpus: int, threads: int) -> None:
        assert self._placed is not None
        options = {
            "name": spec.name,
            "num_cpus": CPU_SHARE,
            "num_gpus": gpus,
            "max_restarts": 0,  # a lone restart cannot rejoin its island
            "max_concurrency": CALLS_AT_A_TIME,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=index),
            # Threads that spin while idle would take the cores from the other workers of this machine.
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": str(threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # who asked for no GPU sees none
                }
            },
        }
        try:
            handle = ray.remote(spec.kind).options(**options).remote(spec.argument)
        except ValueError as error:
            raise ClusterRunning(spec.name.split("/")[0], None, None) from error
        self._members.append(RayActor(spec.name, handle))

    def end(self) -> None:
        for member in self._members:
            member.kill()
        if self._placed is not None:
            remove_placement_group(self._placed)
            self._placed = None


class RayActor(ActorProcess):
    """Answers arrive on a thread of Ray's, which only fills the future."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def call(self, method: str, *arguments: object) -> Future[Any]:
        answer: Future[Any] = Future()
        raw = getattr(self._handle, method).remote(*arguments).future()
        raw.add_done_callback(lambda done: _fill(answer, done, self.name))
        return answer

    def kill(self) -> None:
        ray.kill(self._handle)


def _fill(answer: Future[Any], raw: Future[Any], name: str) -> None:
    error = raw.exception()
    if error is None:
        answer.set_result(raw.result())
    elif isinstance(error, ray.exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        answer.set_exception(cause if isinstance(cause, Exception) else error)
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # Where the constructor failed, the exception's own text comes last.
        answer.set_exception(ProcessEnded(name, lines[-1] if "creation task" in lines[0] else lines[0]))
