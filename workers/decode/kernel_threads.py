"""The number of threads that a worker's native kernels use."""

import os

import torch

from tandem.cache.kernels.native.crew import Crew
from tandem.workers.config import WorkerConfig


def threads_of(config: WorkerConfig) -> tuple[int | None, int | None]:
    """A worker's threads on this host, and those that it has while no prompt is computed for it. See WorkerConfig."""
    own = config.threads
    if own is None and config.workers_on_host is not None:
        own = max(1, len(os.sched_getaffinity(0)) // config.workers_on_host)
    if own is None or config.decode_workers is None:
        return own, own
    ranks = config.island_ranks
    processes = ranks.processes
    if config.epochs:  # an elastic island has vacant places
        processes = sum(size for size, epoch in zip(ranks, config.epochs, strict=True) if epoch)
    return own, own * processes // (config.decode_workers * ranks[config.pe])


class KernelThreads:
    """`own` threads, and `alone` while no prompt is computed for this worker: then prefill workers' cores idle.

    Owned by the step thread.
    """

    def __init__(self, crew: Crew | None, own: int | None, alone: int | None = None) -> None:
        """crew: None where there are no native kernels. own None: as many as torch has; alone None: as many as own."""
        self._crew = crew
        self._set(own, alone)

    def share(self, own: int | None, alone: int | None) -> None:
        """Sets the numbers of threads. Runs on the step thread: torch counts threads for each thread that computes."""
        if own is not None:
            torch.set_num_threads(own)
        self._set(own, alone)

    def use(self, *, alone: bool) -> None:
        if self._crew is not None and self._alone != self._own:
            self._crew.threads = self._alone if alone else self._own

    def _set(self, own: int | None, alone: int | None) -> None:
        self._own = own or torch.get_num_threads()
        self._alone = alone or self._own
        if self._crew is not None:
            self._crew.threads = self._own
