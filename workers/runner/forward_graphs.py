"""CUDA graphs of forwards: a forward in fixed memory is captured once, and costs the host one launch from then on."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.workers.runner.batch_buckets import bucket_of

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]
"""Takes a computation on fixed memory; returns what repeats it, and gives its result's memory."""


class GraphCapture:
    """Captures CUDA graphs that share one pool of memory, their results too. So only the result of the last replay can
    be read: the next replay of any graph overwrites it.

        pool   | result of graph 1 | temporaries of graph 1   |
               | result of graph 2 | temporaries of 2 |           graph 2 was captured after result 1 was released
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        compute()  # kernels are built and loaded outside the capture
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: a worker's own do not, a test's may.
        with uncollected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        borrowed = borrow(result)
        del result  # its block is free for the next capture; the pool itself lives as long as the graphs

        def replay() -> Tensor:
            graph.replay()
            return borrowed

        return replay


class _Bytes:
    """A storage's memory on a GPU, by the CUDA Array Interface, which keeps nothing alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr(), False  # not read-only
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": address,
            "strides": None,
            "version": 3,
        }


def borrow(tensor: Tensor) -> Tensor:
    """A view of a tensor on a GPU, not empty, that does not keep its memory: once `tensor` is gone, others may get that
    memory."""
    whole = torch.as_tensor(_Bytes(tensor.untyped_storage()), device=tensor.device)
    return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def uncollected() -> Iterator[None]:
    """Runs a block without garbage collection. If a CUDA graph of an earlier worker is freed during a capture, it
    spoils the capture."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class ForwardGraphs:
    """A forward runs in the least graph that holds its tokens, filled up with padding."""

    def __init__(
        self, buffers: Sequence[GraphBuffers], capture: Capture, compute: Callable[[GraphBuffers], Tensor]
    ) -> None:
        """Captures compute() for each of `buffers`: PagedKVCache.graph_buffers, at least one, in ascending order."""
        self.buffers = buffers
        self.sizes = tuple(one.size for one in buffers)
        self._replays: dict[GraphBuffers, Replay] = {}
        for one in reversed(buffers):  # smaller ones fit into a larger one's memory
            one.clear()
            self._replays[one] = capture(partial(compute, one))

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def takes(self, num_sequences: int, num_tokens: int) -> bool:
        return num_sequences <= self.buffers[0].limits.num_sequences and num_tokens <= self.sizes[-1]

    def choose(self, num_tokens: int) -> GraphBuffers:
        """Returns the buffers for a forward of so many tokens."""
        return self.buffers[bucket_of(self.sizes, num_tokens)]

    def replay(self, buffers: GraphBuffers) -> Tensor:
        """The result of the forward that the buffers hold, in memory that the next replay writes over."""
        return self._replays[buffers]()
