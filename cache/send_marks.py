"""Sequences whose KV also goes to another worker, and what each forward has to send for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.cache.errors import InvalidArgument
from tandem.cache.plan import Send, TokenLayout, slots_of
from tandem.cache.position_map import SKIP, Int32Array, PositionMap
from tandem.cache.stream_table import StreamTable
from tandem.cache.window import Int64Array


@dataclass(eq=False)
class SendMark:
    """Positions begin … end - 1 go to target_pe; per group, slots[p - begin] (int32) is where position p goes.

    planned and issued: positions below are in a plan, respectively written by a forward that ended.
    """

    target_pe: int
    begin: int
    end: int
    slots: tuple[Int32Array, ...]
    planned: int
    issued: int


@dataclass
class _Batch:
    """What goes to one PE in one group, gathered over sequences."""

    token_indices: list[np.ndarray] = field(default_factory=list)
    token_slots: list[np.ndarray] = field(default_factory=list)
    source_slots: list[np.ndarray] = field(default_factory=list)
    target_slots: list[np.ndarray] = field(default_factory=list)


class SendMarks:
    """The marks of a cache's sequences. A mark that is used up stays as a count until its sequence goes."""

    def __init__(self) -> None:
        self._marks: dict[int, SendMark] = {}

    def add(self, sequence: int, position_map: PositionMap, target_pe: int, held_from: Sequence[int]) -> None:
        """Marks a sequence of which each group holds the positions from held_from on.

        Replaces a mark that is used up; InvalidArgument when it has one that is not, and for a map that does not fit.
        """
        if len(position_map.runs) != len(held_from):
            raise InvalidArgument(
                f"the position map has {len(position_map.runs)} layer groups; the layout has {len(held_from)}"
            )
        begin = position_map.start_position
        for group, (runs, held) in enumerate(zip(position_map.runs, held_from, strict=True)):
            if begin + runs.num_skipped < held:
                raise InvalidArgument(
                    f"the position map asks for position {begin + runs.num_skipped} of layer group {group}; "
                    f"those before {held} have left its window"
                )
        old = self._marks.get(sequence)
        if old is not None and old.planned < old.end:
            raise InvalidArgument(f"sequence {sequence} is marked already, up to position {old.end}; it may be once")
        slots = tuple(runs.slots() for runs in position_map.runs)
        self._marks[sequence] = SendMark(target_pe, begin, position_map.end_position, slots, begin, begin)

    def drop(self, sequence: int) -> None:
        self._marks.pop(sequence, None)

    def num_sent(self, sequence: int) -> int:
        mark = self._marks.get(sequence)
        return mark.issued - mark.begin if mark else 0

    def num_slots_sent(self, sequence: int) -> list[int]:
        """Per group how many of these positions have a slot; [] for a sequence that was never marked."""
        mark = self._marks.get(sequence)
        if mark is None:
            return []
        return [int(np.count_nonzero(slots[: mark.issued - mark.begin] != SKIP)) for slots in mark.slots]

    def is_done(self, sequence: int) -> bool:
        """Whether every position of the map was issued; True for a sequence that was never marked."""
        mark = self._marks.get(sequence)
        return mark is None or mark.issued == mark.end

    def end_of_unsent(self, sequence: int, length: int) -> int | None:
        """Where a map ends that asks for some of a sequence's `length` positions yet; None where none does."""
        mark = self._marks.get(sequence)
        return None if mark is None or mark.planned >= min(length, mark.end) else mark.end

    def any_open(self, sequences: Iterable[int]) -> bool:
        """Whether a map of one of them is not used up."""
        return bool(self._marks) and not all(self.is_done(int(sequence)) for sequence in sequences)

    def rewind(self, sequence: int, length: int) -> None:
        """Positions from `length` on were popped: what replaces them is sent again, unless the map was used up."""
        mark = self._marks.get(sequence)
        if mark is not None and mark.planned < mark.end:
            mark.planned = max(mark.begin, min(mark.planned, length))
            mark.issued = min(mark.issued, mark.planned)

    def commit(self, sent: Iterable[tuple[int, int]]) -> None:
        """The forward that was to send up to these positions has ended."""
        for sequence, end in sent:
            mark = self._marks.get(sequence)
            if mark is not None:
                mark.issued = min(max(mark.issued, end), mark.planned)

    def plan(
        self,
        sequences: tuple[int, ...],
        rows: Int64Array,
        tokens: TokenLayout,
        pages: tuple[Int32Array, ...],
        page_size: int,
        streams: StreamTable,
    ) -> tuple[list[tuple[Send, ...]], tuple[tuple[int, int], ...]]:
        """Sends of one forward, per group, and for each marked sequence the position up to which it will be sent.

        rows: int64 [B], the sequences' rows in pages (per group int32 [max_sequences, max_pages]).
        """
        if not self._marks:
            return [() for _ in pages], ()
        batches: list[dict[int, _Batch]] = [{} for _ in pages]
        sent = []
        for index, sequence in enumerate(sequences):
            mark = self._marks.get(sequence)
            if mark is None or mark.planned == mark.end:
                continue
            row, first = int(rows[index]), int(tokens.qo_indptr[index])
            length = int(tokens.seq_lens[index] + streams.dropped[row])
            cached = length - (int(tokens.qo_indptr[index + 1]) - first)
            end = min(length, mark.end)
            for group, batch in enumerate(batches):
                into = batch.setdefault(mark.target_pe, _Batch())
                positions = np.arange(mark.planned, min(cached, end))
                indices = np.where(positions < streams.sinks[row], positions, positions - streams.dropped[row])
                _add_cached(into, mark, group, positions, indices, pages[group][row], page_size)
                _add_tokens(into, mark, group, np.arange(max(cached, mark.begin), end), first - cached)
            mark.planned = max(mark.planned, end)
            sent.append((sequence, mark.planned))
        return [tuple(_send(pe, batch) for pe, batch in group.items()) for group in batches], tuple(sent)


def _add_cached(
    batch: _Batch,
    mark: SendMark,
    group: int,
    positions: np.ndarray,
    indices: np.ndarray,
    pages: Int32Array,
    page_size: int,
) -> None:
    """indices: where the sequence, whose page ids are `pages`, stores the positions."""
    targets = mark.slots[group][positions - mark.begin]
    wanted = targets != SKIP
    batch.source_slots.append(slots_of(pages, indices[wanted], page_size))
    batch.target_slots.append(targets[wanted])


def _add_tokens(batch: _Batch, mark: SendMark, group: int, positions: np.ndarray, shift: int) -> None:
    """shift: from a position of the sequence to its row among the packed tokens."""
    targets = mark.slots[group][positions - mark.begin]
    wanted = targets != SKIP
    batch.token_indices.append(positions[wanted] + shift)
    batch.token_slots.append(targets[wanted])


def _send(pe: int, batch: _Batch) -> Send:
    return Send(
        target_pe=pe,
        token_indices=torch.from_numpy(np.concatenate(batch.token_indices)),
        token_slots=torch.from_numpy(np.concatenate(batch.token_slots)),
        source_slots=np.concatenate(batch.source_slots),
        target_slots=np.concatenate(batch.target_slots),
    )
