"""Position maps: where the KV of consecutive positions goes, as runs of slots."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tandem.cache.plan.arrays import Int32Array, integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.spans import Sliding

SKIP = -1  # a position that is not written


@dataclass(frozen=True, eq=False)
class SlotRuns:
    """Slots in compressed form: run i stands for begins[i], begins[i]+1, … (lengths[i] slots).

    begins, lengths: int32 [n]. A run whose begin is SKIP stands for lengths[i] times SKIP. (Apache TVM has the same as
    [n, begin_1, length_1, …, begin_n, length_n].)
    """

    begins: Int32Array
    lengths: Int32Array

    def __post_init__(self) -> None:
        if self.begins.shape != self.lengths.shape or self.begins.ndim != 1:
            raise InvalidArgument(
                f"begins has shape {self.begins.shape} and lengths {self.lengths.shape}; both must be [n]"
            )
        if self.begins.dtype != np.int32 or self.lengths.dtype != np.int32:
            raise InvalidArgument(f"begins is {self.begins.dtype} and lengths {self.lengths.dtype}; both must be int32")
        if self.lengths.size and int(self.lengths.min()) < 1:
            raise InvalidArgument(f"a run has length {int(self.lengths.min())}; lengths must be at least 1")
        if self.begins.size and int(self.begins.min()) < SKIP:
            raise InvalidArgument(f"a run begins at {int(self.begins.min())}; slots are at least 0, or -1 to skip")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SlotRuns)
            and np.array_equal(self.begins, other.begins)
            and np.array_equal(self.lengths, other.lengths)
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_slots(cls, slots: Iterable[int] | Int32Array) -> "SlotRuns":
        """Makes the fewest runs that stand for `slots` (int32 [num_tokens])."""
        array = np.asarray(slots, dtype=np.int32)
        if array.size == 0:
            return cls(np.empty(0, np.int32), np.empty(0, np.int32))
        step = np.diff(array)
        joined = np.where(array[1:] == SKIP, array[:-1] == SKIP, (step == 1) & (array[:-1] != SKIP))
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        lengths = np.diff(np.concatenate((starts, [array.size])))
        return cls(array[starts], lengths.astype(np.int32))

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def end(self) -> int:
        """One more than the largest slot; 0 without one."""
        return int((self.begins.astype(np.int64) + self.lengths)[self.begins != SKIP].max(initial=0))

    @property
    def num_skipped(self) -> int:
        """Positions before the first that has a slot."""
        if self.begins.size and int(self.begins[0]) != SKIP:
            return 0
        wanted = np.flatnonzero(self.begins != SKIP)
        return int(self.lengths[: wanted[0] if wanted.size else None].sum(dtype=np.int64))

    def slots(self) -> Int32Array:
        """int32 [num_tokens]: the slot of each position, SKIP where nothing is written."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        total = int(ends[-1]) if ends.size else 0
        offsets = np.arange(total, dtype=np.int64) - np.repeat(ends - self.lengths, self.lengths)
        begins = np.repeat(self.begins, self.lengths)
        return np.where(begins == SKIP, SKIP, begins + offsets).astype(np.int32)


@dataclass(frozen=True)
class PositionMap:
    """The slots in which a receiver wants positions start_position … start_position + num_tokens - 1 of one sequence.

    Each layer group has a SlotRuns with a slot for each of the num_tokens positions. In a group with an entry for
    every[group] positions, it has a slot for each entry that the positions complete. Slots are numbers in the
    receiver's pools, not addresses. sliding: how the receiver slides; None: it does not, and takes all K rotated.
    every: at least one group has 1; None: all have 1.
    """

    start_position: int
    runs: tuple[SlotRuns, ...]
    sliding: Sliding | None = None
    every: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        integer("start_position", self.start_position, least=0)
        if self.every is not None and set(self.every) == {1}:
            object.__setattr__(self, "every", None)  # equal maps compare equal
        if self.every is None:
            counts = {runs.num_tokens for runs in self.runs}
            if len(counts) != 1:
                raise InvalidArgument(
                    f"runs hold {sorted(counts)} positions; every layer group must hold the same number"
                )
            return
        for group, (runs, count) in enumerate(zip(self.runs, self._counts(self.every), strict=True)):
            if runs.num_tokens != count:
                raise InvalidArgument(f"runs[{group}] hold {runs.num_tokens} entries; they must hold {count}")

    @property
    def num_tokens(self) -> int:
        return self.runs[0 if self.every is None else self.every.index(1)].num_tokens

    def fits(self, every: tuple[int, ...]) -> bool:
        """Whether the runs are of groups with an entry for `every` positions each."""
        return (self.every or (1,) * len(self.runs)) == every

    def _counts(self, every: tuple[int, ...]) -> list[int]:
        """The entries that the positions complete in each group."""
        return [self.end_position // one - self.start_position // one for one in every]

    @property
    def end_position(self) -> int:
        return self.start_position + self.num_tokens
