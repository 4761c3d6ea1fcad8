"""CUDA graphs of forwards, one for each of some graph buffers."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.workers.runner.batch_buckets import bucket_of
from tandem.workers.runner.graph_capture import Capture, Replay


class ForwardGraphs:
    """A forward runs in the least graph that holds its tokens, filled up with padding."""

    def __init__(self, buffers: Sequence[GraphBuffers]) -> None:
        """buffers: PagedKVCache.graph_buffers, at least one, in ascending order."""
        self.buffers = buffers
        self._sizes = [one.size for one in buffers]
        self._replays: dict[GraphBuffers, Replay] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def takes(self, num_sequences: int, num_tokens: int) -> bool:
        return num_sequences <= self.buffers[0].limits.num_sequences and num_tokens <= self._sizes[-1]

    def choose(self, num_tokens: int) -> GraphBuffers:
        """Those that a forward of so many tokens is to be begun with."""
        return self.buffers[bucket_of(self._sizes, num_tokens)]

    def replay(self, buffers: GraphBuffers) -> Tensor:
        """What the forward that the buffers hold computes, in memory that the next replay writes over."""
        return self._replays[buffers]()


def capture_all(graphs: Sequence[ForwardGraphs], capture: Capture, compute: Callable[[GraphBuffers], Tensor]) -> None:
    """Captures compute() for each of the graphs' buffers."""
    owners = [(one, of) for of in graphs for one in of.buffers]
    for buffers, of in sorted(owners, key=lambda owner: -owner[0].size):  # smaller ones fit into a larger one's memory
        buffers.clear()
        of._replays[buffers] = capture(partial(compute, buffers))
