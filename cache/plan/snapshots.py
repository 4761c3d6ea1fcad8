"""Snapshots of recurrent states: where in a sequence they are taken, and what a forward writes."""

from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array


class SnapshotRule(NamedTuple):
    """every: positions between two snapshots of a sequence, a multiple of page_size. most: pages of snapshots that
    sequences hold at once, those of the prefix index not counted; 0: none are taken."""

    every: int
    most: int


NO_SNAPSHOTS = SnapshotRule(1, 0)


class StateWrites(NamedTuple):
    """Snapshots that one forward writes, int64 [n] each: of sequences[i] of the batch, the state behind its first
    tokens[i] new tokens goes to pages[i]. Those of one sequence stand together, in the order of their tokens."""

    sequences: Int64Array
    tokens: Int64Array
    pages: Int64Array


NO_WRITES = StateWrites(*(np.empty(0, np.int64) for _ in range(3)))
