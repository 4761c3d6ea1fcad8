"""More workers than GPUs: each has that of its PE, or a share of it; Ray believes in more GPUs."""

import os
from collections.abc import Sequence
from dataclasses import replace

import ray
import torch

from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec, ProcessGroup
from tandem.cluster.processes.ray_processes import NAMESPACE, RayProcesses
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.workers.config import WorkerConfig


class SharingWorker(WorkerActor):
    """Has the GPU of its number among the island's processes, whatever Ray says; those beyond the last GPU begin at the
    first again."""

    def __init__(self, config: WorkerConfig) -> None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        number = sum(config.ranks[: config.pe]) + config.rank if config.ranks else config.pe
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % torch.cuda.device_count())
        super().__init__(config)


class SharingProcesses(RayProcesses):
    def __init__(self, num_gpus: int) -> None:
        """num_gpus: of all islands' workers, if each had its own."""
        super().__init__()
        self._num_gpus = num_gpus

    def start(self, cluster: str, num_cpus: int | None) -> None:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            namespace=NAMESPACE,
        )
        super().start(cluster, num_cpus)

    def start_again(
        self,
        group: ProcessGroup | None,
        specs: Sequence[ActorSpec],
        *,
        gpus: int,
        threads: int,
        where: Where = ANYWHERE,
    ) -> ProcessGroup:
        shared = [replace(spec, kind=SharingWorker) if spec.kind is WorkerActor else spec for spec in specs]
        return super().start_again(group, shared, gpus=gpus, threads=threads, where=where)

    def stop(self) -> None:
        ray.shutdown()
