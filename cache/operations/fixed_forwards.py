"""Forwards over fixed arrays, for CUDA graphs: which sequences may be in one, and how it is filled."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from tandem.cache.attention.fixed_batch import FixedBatch, make_fixed_batches
from tandem.cache.attention.fixed_prompts import FixedPrompts, make_fixed_prompts
from tandem.cache.attention.rotations import Rotations
from tandem.cache.operations.growth import Growth
from tandem.cache.operations.store import Store
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.arrays import Int64Array, integers
from tandem.cache.plan.errors import InvalidArgument


class FixedForwards:
    """Owned by a PagedKVCache, whose parts it works on and whose docstrings say what its calls do."""

    def __init__(self, store: Store, growth: Growth, rotations: Rotations) -> None:
        self._layout, self._rotations = store.layout, rotations
        self._table, self._marks, self._groups = store.table, store.marks, store.groups
        self._max_pages = store.table.groups[0].pages.shape[1]
        self._growth = growth

    def batches(self, sizes: Sequence[int], num_q_heads: int, num_inputs: int, sharing: bool) -> list[FixedBatch]:
        return make_fixed_batches(
            sizes,
            [group.kernels for group in self._groups],
            self._rotations,
            self._layout.places,
            num_q_heads=num_q_heads,
            num_inputs=num_inputs,
            max_pages=self._max_pages,
            sharing=sharing,
        )

    def prompts(self, sizes: Sequence[int], num_sequences: int, num_q_heads: int) -> list[FixedPrompts]:
        return make_fixed_prompts(
            sizes,
            num_sequences,
            [group.kernels for group in self._groups],
            self._rotations,
            self._layout.places,
            num_q_heads=num_q_heads,
            max_pages=self._max_pages,
            page_size=self._layout.page_size,
            stored=[group.stored for group in self._groups],
        )

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

    def begin_step(self, batch: FixedBatch, seq_ids: tuple[int, ...], inputs: Sequence[Int64Array]) -> None:
        if len(seq_ids) > batch.size:
            raise InvalidArgument(f"seq_ids has {len(seq_ids)} sequences; the batch has room for {batch.size}")
        shapes = [array.shape for array in inputs]
        if shapes != [(len(seq_ids),)] * len(batch.inputs):
            raise InvalidArgument(f"inputs has shapes {shapes}; {len(batch.inputs)} of ({len(seq_ids)},) are accepted")
        rows = self._table.rows(seq_ids)
        if self._marks.any_open(rows):
            raise InvalidArgument("seq_ids has a sequence that is being sent; a fixed batch sends nothing")
        self._check_still(rows)
        rows, tokens = self._growth.grow(seq_ids, np.ones(len(seq_ids), np.int64), in_flight=1)
        look_ups = [group.look_up_apart if batch.sharing else group.look_up for group in self._groups]
        batch.fill(tokens, [look_up(rows, tokens) for look_up in look_ups], inputs)

    def begin_prompts(
        self,
        prompts: FixedPrompts,
        seq_ids: tuple[int, ...],
        append_lengths: Sequence[int] | Int64Array,
        token_ids: Int64Array,
        last_rows: Int64Array,
    ) -> Standing:
        """See PagedKVCache; of the rows that have grown."""
        appends = integers("append_lengths", append_lengths)
        counts = len(seq_ids), last_rows.size, int(appends.sum())
        room = prompts.num_sequences, prompts.num_sequences, prompts.size
        if any(count > most for count, most in zip(counts, room, strict=True)):
            raise InvalidArgument(f"there are {counts} sequences, rows with logits and tokens; at most {room} fit")
        if token_ids.shape != counts[2:]:
            raise InvalidArgument(f"token_ids has shape {token_ids.shape}; append_lengths asks for {counts[2:]}")
        self._check_still(self._table.rows(seq_ids))
        rows, tokens = self._growth.grow(seq_ids, appends)
        prompts.fill(tokens, [group.look_up(rows, tokens) for group in self._groups], token_ids, last_rows)
        return self._table.standing(rows)

    def _check_still(self, rows: Int64Array) -> None:
        if self._table.streams.count and self._table.streams.windows[rows].any():
            raise InvalidArgument("seq_ids has a sequence that slides; fixed arrays take only others")
