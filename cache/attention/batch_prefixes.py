"""The shared prefixes of a batch, found once and kept while the same sequences are stepped."""

import numpy as np
from numpy.typing import NDArray

from tandem.cache.kernels.torch.sliding import SlidingParts
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule, find_shared_prefixes
from tandem.cache.plan.tables import TokenLayout


class BatchPrefixes:
    """Finds the pages that rows of one layer group share. With rule None they share nothing.

    A finding holds while the rows are the same and none has lost or exchanged a page. A row that grows gets pages of
    its own, and sequences that slide do not share.
    """

    def __init__(self, table: GroupTable, rule: SharingRule | None) -> None:
        self.rule = rule
        self._table = table
        self._rows = np.empty(0, np.int64)
        self._able: NDArray[np.bool_] | None = None
        self._num_changes = 0
        self._found: SharedPrefixes | None = None

    def find(
        self, rows: Int64Array, seq_lens: Int32Array, able: NDArray[np.bool_] | None = None
    ) -> SharedPrefixes | None:
        """Finds what rows (int64 [B]) with one new token each share. The same array must stand for the same sequences.

        seq_lens: int32 [B], positions with the new token. able: bool [B], the rows that may share; None: all.
        """
        if self.rule is None or rows.size < 2:
            return None
        if rows is not self._rows or self._table.num_changes != self._num_changes or not _same(able, self._able):
            # A page that is still written to is nobody else's.
            limits = (seq_lens.astype(np.int64) - 1) // self._table.page_size
            if able is not None:
                limits = limits * able
            self._found = find_shared_prefixes(self._table.pages, rows, limits, self.rule)
            self._rows, self._able, self._num_changes = rows, able, self._table.num_changes
        return self._found


def able_to_share(tokens: TokenLayout, sliding: SlidingParts | None) -> NDArray[np.bool_] | None:
    """bool [B]: the sequences that may share in a forward; None: all.

    Only those with one new token that is no tree's. Sequences that slide do not, for their K is not rotated.
    """
    if sliding is None and tokens.trees is None and tokens.each_one:
        return None
    able = tokens.single
    if sliding is not None:
        able[sliding.sequences] = False
    return able


def _same(first: NDArray[np.bool_] | None, second: NDArray[np.bool_] | None) -> bool:
    return first is second or (first is not None and second is not None and bool((first == second).all()))
