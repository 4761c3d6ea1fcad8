"""The sequences of a cache as arrays: planning a step costs no Python loop over them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.cache.pages.group_table import GroupTable
from tandem.cache.pages.sliding_table import SlidingTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, integer
from tandem.cache.plan.errors import InvalidArgument, OutOfSequences
from tandem.cache.plan.spans import Paging, Sliding


def ids_of(seq_ids: Sequence[int] | Int64Array) -> tuple[int, ...]:
    """Returns the ids of sequences as a tuple, as SequenceTable takes them."""
    try:
        return tuple(seq_ids.tolist() if isinstance(seq_ids, np.ndarray) else seq_ids)
    except TypeError:
        raise InvalidArgument(f"seq_ids is {seq_ids!r}; it must be a row of sequences") from None


class Standing(NamedTuple):
    """Rows (int64 [B]) of a table when their forward was planned. cuts, num_cuts: the table's values then."""

    table: "SequenceTable"
    rows: Int64Array
    cuts: Int64Array
    num_cuts: int

    @property
    def holds(self) -> bool:
        """Whether no position of the rows has been taken back since."""
        return self.table.num_cuts == self.num_cuts or not (self.table.cuts[self.rows] != self.cuts).any()

    def check(self) -> None:
        """InvalidArgument unless no position of the rows has been taken back since."""
        if not self.holds:
            raise InvalidArgument("the forward has a sequence that was shortened or removed since; begin() plans anew")


class SequenceTable:
    """One row a sequence; its caller knows it by any int, the arrays by its row.

    lengths: positions stored. They are the positions appended, except in a sliding sequence: `sliding` knows what was
    evicted. reserved: positions that a reservation reaches to. receiving: a remote writer fills the last positions.
    unclean: what stands past the end in the last page was not cleared, see Receptions. cuts: how often positions of a
    row were taken back. shortened: whether they were since it last grew: only then may its last page, partly used, also
    be another's, because rows otherwise share full pages only. groups: pages, per layer group. arriving: the number of
    the last copy up of a row's pages, see PageCopies. fetched: positions of those pages. lifted: the part of fetched
    that came from a disk. encoder_lens: positions of each row's encoder. borders: the page index after these; both 0
    without an encoder.
    """

    def __init__(self, paging: Sequence[Paging], max_sequences: int, max_length: int, page_size: int) -> None:
        """paging: of each layer group."""
        self.max_sequences = integer("max_sequences", max_sequences, least=1)
        self.max_length, self.page_size = max_length, page_size
        self.lengths = np.zeros(max_sequences, np.int64)
        self.reserved = np.zeros(max_sequences, np.int64)
        self.receiving = np.zeros(max_sequences, np.bool_)
        self.unclean = np.zeros(max_sequences, np.bool_)
        self.cuts = np.zeros(max_sequences, np.int64)
        self.shortened = np.zeros(max_sequences, np.bool_)
        self.arriving = np.zeros(max_sequences, np.int64)
        self.fetched = np.zeros(max_sequences, np.int64)
        self.lifted = np.zeros(max_sequences, np.int64)
        self.num_cuts = 0  # of all rows
        self.sliding = SlidingTable(max_sequences, page_size)
        self.encoder_lens = np.zeros(max_sequences, np.int64)
        self.borders = np.zeros(max_sequences, np.int64)
        self.groups = tuple(
            GroupTable(max_sequences, max(one.num_pages(max_length), 1), one, self.borders) for one in paging
        )
        self._rows: dict[int, int] = {}
        self._vacant = list(range(max_sequences - 1, -1, -1))
        self._last_keys: tuple[int, ...] = ()
        self._last_rows = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rows

    def sequences(self) -> list[int]:
        return list(self._rows)

    def add(self, sequence: int, encoder_len: int = 0) -> int:
        """The row of a new, empty sequence. OutOfSequences when every row is taken."""
        if sequence in self._rows:
            raise InvalidArgument(f"sequence {sequence} is there already")
        if not self._vacant:
            raise OutOfSequences(f"sequence {sequence} is one too many; max_sequences is {self.max_sequences}")
        row = self._vacant.pop()
        self._rows[sequence] = row
        self.lengths[row] = self.reserved[row] = self.arriving[row] = self.fetched[row] = self.lifted[row] = 0
        self.encoder_lens[row], self.borders[row] = encoder_len, -(-encoder_len // self.page_size)
        self.receiving[row] = self.unclean[row] = self.shortened[row] = False
        for group in self.groups:
            group.reset(row)
        return row

    def remove(self, sequence: int) -> None:
        row = self._rows.pop(sequence)
        self.sliding.reset(row)
        self.count_cut(row)
        self._vacant.append(row)
        self._last_keys, self._last_rows = (), np.empty(0, np.int64)

    def count_cut(self, row: int) -> None:
        """Positions of a row are taken back: forwards planned before cannot be computed any more."""
        self.cuts[row] += 1
        self.shortened[row] = True
        self.num_cuts += 1

    def row(self, sequence: int) -> int:
        try:
            return self._rows[sequence]
        except (KeyError, TypeError):  # what has no hash is no sequence either
            raise InvalidArgument(f"sequence {sequence} is not there; add_sequence makes one") from None

    def slide(self, row: int, sliding: Sliding) -> None:
        """A row that holds all its positions, but for those that windows have dropped, slides from now on."""
        for group in self.groups:
            group.shown[row] = group.begins[row]
        self.sliding.enable(row, sliding)

    def check_length(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self.max_length:
            raise InvalidArgument(f"sequence {sequence} would have {length} positions; 0 … {self.max_length} fit")

    def border(self, row: int) -> int:
        """The first position after the encoder's of a row, which fill whole pages."""
        return int(self.borders[row]) * self.page_size

    def num_positions(self, row: int) -> int:
        """Positions appended to a row."""
        return int(self.lengths[row] + self.sliding.dropped[row])

    def rows(self, keys: tuple[int, ...]) -> Int64Array:
        """int64 [B], to be read only; InvalidArgument when one is unknown or stands twice.

        An array returned before stands for the same sequences, as long as none has been removed since.
        """
        if keys is not self._last_keys and keys != self._last_keys:  # a decode batch is the same for many steps
            self._last_rows = self._look_up(keys)
            self._last_keys = keys
        return self._last_rows

    def _look_up(self, keys: tuple[int, ...]) -> Int64Array:
        try:
            rows = np.fromiter(map(self._rows.__getitem__, keys), np.int64, len(keys))
        except (KeyError, TypeError):
            rows = np.array([self.row(sequence) for sequence in keys])  # says which is not there
        if len(set(keys)) != len(keys):
            raise InvalidArgument(f"sequences {list(keys)} are not distinct; one may stand once in a forward")
        return rows

    def standing(self, rows: Int64Array) -> Standing:
        """Returns the standing of `rows` now."""
        return Standing(self, rows, self.cuts[rows], self.num_cuts)

    def held_pages(self, row: int) -> tuple[Int32Array, ...]:
        """Returns for each group a copy of the page ids that a row holds."""
        return tuple(group.held(row) for group in self.groups)

    def full_pages(self, row: int, length: int) -> tuple[Int32Array, ...]:
        """Returns for each group the pages of a row that its first `length` positions fill."""
        return tuple(group.held(row, 0, length // group.paging.positions) for group in self.groups)
