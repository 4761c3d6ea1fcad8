"""Decode steps in batches of fixed arrays: which sequences may be in one, and how it is filled."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.fixed_batch import FixedBatch
from tandem.cache.growth import Growth
from tandem.cache.store import Store
from tandem.cache.window import Int64Array


class FixedSteps:
    """Owned by a PagedKVCache, whose parts it works on and whose docstrings say what its calls do."""

    def __init__(self, store: Store, growth: Growth) -> None:
        self._table, self._marks, self._groups, self._layout = store.table, store.marks, store.groups, store.layout
        self._growth = growth

    def pays_to_share(self, batch: FixedBatch, seq_ids: tuple[int, ...]) -> bool:
        rows = self._table.rows(seq_ids)
        seq_lens = self._table.lengths[rows].astype(np.int32) + 1
        shared = [group.shared(rows, seq_lens) for group in self._groups]
        return any(one is not None for one in shared) and batch.takes(shared)

    def foresee(self, batch: FixedBatch, seq_ids: tuple[int, ...], inputs: Sequence[Int64Array]) -> bool:
        tokens = self._growth.foresee(seq_ids)
        if tokens is None or self._layout.has_windows or batch.sharing:
            return False
        rows = self._table.rows(seq_ids)
        batch.prepare(tokens, [group.look_up(rows, tokens) for group in self._groups], inputs)
        return True

    def step_foreseen(
        self, batch: FixedBatch, seq_ids: tuple[int, ...], inputs: Sequence[Int64Array], replay: Callable[[], Tensor]
    ) -> Tensor | None:
        if not self._growth.is_foreseen(self._table.rows(seq_ids)):
            return None
        batch.send(inputs)
        result = replay()
        self._growth.grow(seq_ids, np.ones(len(seq_ids), np.int64), in_flight=1)
        return result

    def begin(self, batch: FixedBatch, seq_ids: tuple[int, ...], inputs: Sequence[Int64Array]) -> None:
        if len(seq_ids) > batch.size:
            raise InvalidArgument(f"seq_ids has {len(seq_ids)} sequences; the batch has room for {batch.size}")
        shapes = [array.shape for array in inputs]
        if shapes != [(len(seq_ids),)] * len(batch.inputs):
            raise InvalidArgument(f"inputs has shapes {shapes}; {len(batch.inputs)} of ({len(seq_ids)},) are accepted")
        rows = self._table.rows(seq_ids)
        if self._marks.any_open(rows):
            raise InvalidArgument("seq_ids has a sequence that is being sent; a fixed batch sends nothing")
        if self._table.streams.count and self._table.streams.windows[rows].any():
            raise InvalidArgument("seq_ids has a sequence that slides; a fixed batch takes only others")
        rows, tokens = self._growth.grow(seq_ids, np.ones(len(seq_ids), np.int64), in_flight=1)
        look_ups = [group.look_up_apart if batch.sharing else group.look_up for group in self._groups]
        batch.fill(tokens, [look_up(rows, tokens) for look_up in look_ups], inputs)
