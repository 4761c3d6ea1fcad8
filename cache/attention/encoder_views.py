"""Attention to an encoder's entries as plain causal attention: each token becomes the last of a sequence of its own.

A query sees all E entries of its sequence's encoder, whatever its own position is. So it is planned as a query at
position E - 1, and causal attention suffices in decode steps, graphs and prompts.
"""

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.tables import TokenLayout


def see_encoder(rows: Int64Array, tokens: TokenLayout, encoder_lens: Int64Array) -> tuple[Int64Array, TokenLayout]:
    """Returns the row (int64 [T]) of each of T tokens of rows (int64 [B]), and their layout. encoder_lens: int64, by
    row."""
    of = rows if tokens.each_one else rows[tokens.owners]
    seq_lens, count = encoder_lens[of].astype(np.int32), of.size
    indptr = np.arange(count + 1, dtype=np.int32)
    preceding = None if tokens.preceding is None else np.zeros(count, np.int32)  # no row stores what another reads
    return of, TokenLayout(indptr, seq_lens, seq_lens - np.int32(1), np.arange(count), preceding=preceding)
