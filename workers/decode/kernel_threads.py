"""How many threads a worker's native kernels use."""

import torch

from tandem.cache.kernels.native.crew import Crew


class KernelThreads:
    """`own` threads, and `alone` while no prompt is computed for this worker: then prefill workers' cores idle.

    Owned by the step thread.
    """

    def __init__(self, crew: Crew | None, own: int | None, alone: int | None = None) -> None:
        """crew: None where there are no native kernels. own None: as many as torch has; alone None: as many as own."""
        self._crew = crew
        self._own = own or torch.get_num_threads()
        self._alone = alone or self._own
        if crew is not None:
            crew.threads = self._own

    def use(self, *, alone: bool) -> None:
        if self._crew is not None and self._alone != self._own:
            self._crew.threads = self._alone if alone else self._own
