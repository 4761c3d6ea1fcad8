"""CUDA graphs: a computation on fixed memory is captured once, and costs the host one launch from then on."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Takes a computation on fixed memory; returns what repeats it, and gives its result's memory."""


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory: only the result of the last replay is to be read."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        compute()  # kernels are built and loaded outside the capture
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: a worker's own do not, a test's may.
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: a CUDA graph that is let go of within a capture, an earlier worker's, spoils it."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
