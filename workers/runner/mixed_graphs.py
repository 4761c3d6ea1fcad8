"""CUDA graphs that compute a decode step and prompt chunks in one forward, for some sizes of either."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from torch import Tensor

from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.workers.runner.batch_buckets import bucket_of
from tandem.workers.runner.forward_graphs import Capture, Replay

Compute = Callable[[GraphBuffers, GraphBuffers], Tensor]


class MixedGraphs:
    """Both parts run in the least buffers that hold them, filled up with padding."""

    def __init__(
        self, steps: Sequence[GraphBuffers], prompts: Sequence[GraphBuffers], capture: Capture, compute: Compute
    ) -> None:
        """steps, prompts: PagedKVCache.graph_buffers of either kind, in ascending order. Captures compute() of each
        pair."""
        self._steps = steps
        self._prompts = prompts
        self.sizes = tuple(one.size for one in steps), tuple(one.size for one in prompts)
        self._replays: dict[tuple[GraphBuffers, GraphBuffers], Replay] = {}
        for pair in product(reversed(steps), reversed(prompts)):  # smaller ones fit into a larger one's memory
            for buffers in pair:
                buffers.clear()
            self._replays[pair] = capture(partial(compute, *pair))

    def takes(self, num_rows: int, num_sequences: int, num_tokens: int) -> bool:
        fits = num_rows <= self._steps[-1].size and num_tokens <= self._prompts[-1].size
        return fits and num_sequences <= self._prompts[-1].limits.num_sequences

    def choose(self, num_rows: int, num_tokens: int) -> tuple[GraphBuffers, GraphBuffers]:
        """The buffers that a step of so many rows, and chunks of so many tokens, are to be begun with."""
        rows, tokens = self.sizes
        return self._steps[bucket_of(rows, num_rows)], self._prompts[bucket_of(tokens, num_tokens)]

    def replay(self, step: GraphBuffers, prompts: GraphBuffers) -> Tensor:
        """The result of the forwards that the buffers hold, in memory that the next replay writes over."""
        return self._replays[step, prompts]()
