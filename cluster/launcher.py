"""Places a cluster's processes with Ray, forms the island, and takes everything down again. The only user of ray."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.actors import GatewayActor, WorkerActor
from tandem.cluster.config import ClusterConfig
from tandem.cluster.errors import ClusterRunning, ConfigError, StartFailed, TandemError, WorkerLost
from tandem.cluster.process_settings import gateway_settings, threads_per_worker, worker_configs
from tandem.cluster.worker_link import WorkerAddress
from tandem.workers.config import WorkerConfig
from tandem.workers.models.errors import ModelError
from tandem.workers.models.registry import load_config

NAMESPACE = "tandem"
CPU_SHARE = 0.1  # Ray's unit of accounting; what a worker may really use is its number of threads
START_SECONDS = 600.0
STOP_SECONDS = 30.0
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours goes through Ray's object store

Progress = Callable[[Sequence[tuple[str, int, int]]], None]  # (worker, bytes loaded, bytes in all)


class Cluster:
    """A running cluster. start() returns when requests can come; stop() leaves nothing behind and is idempotent.

    Raises ConfigError, StartFailed, ClusterRunning from start(); WorkerLost from wait().
    """

    def __init__(self, config: ClusterConfig, ray_address: str | None = None) -> None:
        if config.model.path is None:
            raise ConfigError("model.path is missing; give --model DIR or set it in the config")
        self._config = config
        self._ray_address = ray_address
        self._owns_ray = False
        self._group: PlacementGroup | None = None
        self._workers: list[tuple[WorkerConfig, Any]] = []
        self._gateway: Any = None
        self._watched: dict[Any, str] = {}
        self.grpc_address = ""

    def start(self, progress: Progress | None = None) -> str:
        """HOST:PORT of the gateway. progress is called a few times a second while weights are read."""
        try:
            model = load_config(Path(self._config.model.path or ""), self._config.model.dtype)
        except ModelError as error:
            raise ConfigError(f"model.path: {error}") from error
        max_model_len = self._config.model.max_model_len or model.max_length
        if max_model_len > model.max_length:
            raise ConfigError(
                f"model.max_model_len is {max_model_len}; the checkpoint takes at most {model.max_length}"
            )
        _check_port(self._config.gateway.host, self._config.gateway.port)
        try:
            self._start_ray()
            self._place_workers(max_model_len)
            self._load(progress)
            addresses = self._form_island()
            self._start_gateway(addresses, max_model_len)
        except BaseException:
            self.stop()
            raise
        return self.grpc_address

    def wait(self) -> None:
        """Does not return: raises WorkerLost when a process of the cluster ends."""
        ended: list[Any] = []
        while not ended:
            ended, _ = ray.wait(list(self._watched), num_returns=1, timeout=1.0)
        raise WorkerLost(f"{self._watched[ended[0]]} ended unexpectedly{_reason(ended[0])}")

    def stop(self, grace: float = 1.0) -> None:
        """Ends the gateway, then the workers, then Ray if start() started it."""
        if not ray.is_initialized():
            return
        if self._gateway is not None:
            _call_quietly([self._gateway.stop.remote(grace)])
        _call_quietly([actor.stop.remote() for _, actor in self._workers])
        for actor in [self._gateway, *(actor for _, actor in self._workers)]:
            if actor is not None:
                ray.kill(actor)
        self._gateway, self._workers = None, []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False

    def _start_ray(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets any other process of the machine go first
        if ray.is_initialized():
            return
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        if self._ray_address is None:
            options |= {
                "num_cpus": self._config.ray.num_cpus or os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options["address"] = self._ray_address
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = "a local Ray" if self._ray_address is None else f"the Ray at {self._ray_address!r}"
            raise StartFailed(f"{where} cannot be reached: {str(error).splitlines()[0]}") from error
        self._owns_ray = True
        token = Path.home() / ".ray" / "auth_token"
        with suppress(OSError):
            token.chmod(0o600)  # Ray leaves its token readable for everybody

    def _place_workers(self, max_model_len: int) -> None:
        configs = worker_configs(self._config, max_model_len)
        gpus = 1 if self._config.island.device == "cuda" else 0
        worker = {"CPU": CPU_SHARE, "GPU": gpus} if gpus else {"CPU": CPU_SHARE}
        self._group = placement_group([*[worker] * len(configs), {"CPU": CPU_SHARE}], strategy="STRICT_PACK")
        if not self._group.wait(30):
            needed = f"{CPU_SHARE * (len(configs) + 1):.1f} CPUs" + (f" and {len(configs)} GPUs" if gpus else "")
            raise StartFailed(f"Ray has no node with {needed} free")
        for index, config in enumerate(configs):
            name = f"{self._config.name}-{config.role}-{config.pe}"
            self._workers.append((config, self._actor(WorkerActor, name, index, config, gpus)))

    def _actor(self, kind: type, name: str, index: int, argument: object, gpus: int = 0) -> Any:
        assert self._group is not None
        threads = str(threads_per_worker(self._config))
        options = {
            "name": name,
            "num_cpus": CPU_SHARE,
            "num_gpus": gpus,
            "max_restarts": 0,  # a lone restart cannot rejoin its island
            "max_concurrency": 4,  # wait() and progress() run beside the others
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
            # Threads that spin while idle would take the cores from the other workers of this machine.
            "runtime_env": {
                "env_vars": {
                    "OMP_NUM_THREADS": threads,
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # who asked for no GPU sees none
                }
            },
        }
        try:
            return ray.remote(kind).options(**options).remote(argument)
        except ValueError as error:
            raise ClusterRunning(self._config.name, None, None) from error

    def _load(self, progress: Progress | None) -> None:
        calls = [actor.load.remote() for _, actor in self._workers]
        deadline = time.monotonic() + START_SECONDS
        pending = calls
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.2)
            _results(done)
            if progress is not None:
                states = _results([actor.progress.remote() for _, actor in self._workers])
                progress([(_name(config), *state) for (config, _), state in zip(self._workers, states, strict=True)])
            if time.monotonic() > deadline:
                raise StartFailed(f"weights were not read within {START_SECONDS:.0f} s")

    def _form_island(self) -> tuple[WorkerAddress, ...]:
        """Handles travel by way of this process: every PE opens its memory, then every PE maps all the others'."""
        actors = [actor for _, actor in self._workers]
        handles = _results([actor.open.remote() for actor in actors])
        _results([actor.join.remote(handles) for actor in actors])
        addresses = _results([actor.serve.remote() for actor in actors])
        for config, actor in self._workers:
            self._watched[actor.wait.remote()] = f"worker {_name(config)}"
        return tuple(
            WorkerAddress(config.role, config.pe, address)
            for (config, _), address in zip(self._workers, addresses, strict=True)
        )

    def _start_gateway(self, workers: tuple[WorkerAddress, ...], max_model_len: int) -> None:
        settings = gateway_settings(self._config, workers, max_model_len)
        self._gateway = self._actor(GatewayActor, f"{self._config.name}-gateway", len(self._workers), settings)
        (self.grpc_address,) = _results([self._gateway.serve.remote()])
        self._watched[self._gateway.wait.remote()] = "the gateway"


def _name(config: WorkerConfig) -> str:
    return f"{config.role} (PE {config.pe})"


def _results(references: list[Any]) -> list[Any]:
    """What the calls returned; a TandemError or ValueError that an actor raised comes out as StartFailed."""
    try:
        return ray.get(references, timeout=START_SECONDS)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
        if isinstance(cause, TandemError):
            raise cause from None
        raise StartFailed(f"{type(cause).__name__}: {cause}") from error
    except ray.exceptions.RayActorError as error:
        raise StartFailed(str(error).strip()) from error
    except ray.exceptions.GetTimeoutError as error:
        raise StartFailed(f"a worker did not answer within {START_SECONDS:.0f} s") from error


def _reason(reference: Any) -> str:
    try:
        ray.get(reference, timeout=1)
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f": {lines[0]}" if lines else ""
    return ""


def _call_quietly(references: list[Any]) -> None:
    """Waits for calls whose failure changes nothing: what does not stop by itself is killed next."""
    with suppress(ray.exceptions.RayError):
        ray.get(references, timeout=STOP_SECONDS)


def _check_port(host: str, port: int) -> None:
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"gateway.port {port} on {host} cannot be opened ({error.strerror}); "
                "choose a free one with --grpc-port, or 0 for any free one"
            ) from error
