"""CUDA graphs of decode steps by the kind of their buffers: plain ones, for sharing, for sequences that slide."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.runner.batch_buckets import LEAST_TO_SHARE
from tandem.workers.runner.forward_graphs import Capture, ForwardGraphs


class StepGraphs:
    """The graphs of steps of one model; see DecodeGraphs."""

    def __init__(
        self,
        cache: PagedKVCache,
        compute: Callable[[GraphBuffers], Tensor],
        capture: Capture,
        plain: Sequence[GraphBuffers],
        sharing: Sequence[GraphBuffers],
        sliding: Sequence[GraphBuffers],
    ) -> None:
        self._cache = cache
        self.plain = ForwardGraphs(plain, capture, compute)
        self._sharing = ForwardGraphs(sharing, capture, compute) if sharing else None
        self._sliding = ForwardGraphs(sliding, capture, compute) if sliding else None

    def takes(self, rows: int, *, slides: bool) -> bool:
        """Whether a step of so many rows is in a graph. slides: one of them slides."""
        return not slides or (self._sliding is not None and rows <= self._sliding.largest)

    def choose(
        self, sequence_ids: Sequence[int] | Int64Array, rows: int, *, slides: bool = False
    ) -> tuple[ForwardGraphs, GraphBuffers]:
        """Returns the graphs, and their buffers, for the next step of these sequences."""
        if slides and self._sliding is not None:
            return self._sliding, self._sliding.choose(rows)
        if self._sharing is not None and LEAST_TO_SHARE <= rows <= self._sharing.largest:
            buffers = self._sharing.choose(rows)
            if buffers.pays_to_share(sequence_ids):
                return self._sharing, buffers
        return self.plain, self.plain.choose(rows)
