"""Index keys (DeepSeek-V3.2's lightning indexer, 2025): a query scores all positions by short keys, kept next to the
latents, and attends to the best positions.

A position's score is Σ over index heads of weight · max(q · key, 0), with one key for all heads. Sequences of at most
top_k positions need no scores: their queries attend to all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.tables import PageTables, TokenLayout

SCORE_BYTES = 256 << 20  # of scores that kernels on a GPU have in memory together


@dataclass(frozen=True, eq=False)
class Choosers:
    """The n tokens that attend to chosen positions: all new ones of sequences with more than top_k positions.

    sequences: bool [B], whose tokens these are. tokens: int64 [n], theirs among the packed ones, in order. lengths:
    int32 [n], the positions that each sees, 0 … lengths[i] - 1. firsts: int32 [n], where the pages of its sequence
    begin in kv_indices.
    """

    sequences: NDArray[np.bool_]
    tokens: Int64Array
    lengths: Int32Array
    firsts: Int32Array

    @classmethod
    def of(cls, tokens: TokenLayout, tables: PageTables, top_k: int | None) -> "Choosers":
        """top_k None: there are none."""
        sequences = np.zeros(tokens.seq_lens.size, np.bool_) if top_k is None else tokens.seq_lens > top_k
        rows = np.flatnonzero(sequences[tokens.owners])
        firsts = tables.kv_indptr[tokens.owners[rows]]
        return cls(sequences, rows, tokens.positions[rows] + np.int32(1), firsts)
