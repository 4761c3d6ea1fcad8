"""Chunked-local attention as plain causal attention: the tokens of each chunk become a sequence of their own.

A forward that crosses borders of chunks, here of 4 positions, by 7 tokens from position 2 on:

    positions    2 3 │ 4 5 6 7 │ 8        chunks    0 … 3 │ 4 … 7 │ 8 … 11
    sequences     a  │    b    │ c        pages     those of its chunk, up to the sequence's last token
"""

from dataclasses import replace

import numpy as np

from tandem.cache.plan.arrays import Int64Array, indptr_of, ragged_range
from tandem.cache.plan.tables import TokenLayout


def split_by_chunks(rows: Int64Array, tokens: TokenLayout, chunk: int) -> tuple[Int64Array, TokenLayout]:
    """rows (int64 [B]) and tokens with a sequence for each chunk of `chunk` positions that new tokens of one stand in.
    Sequences with trees must stand in one chunk. Rows of a verify step have no other chunk's before them. What crosses
    no border is returned as it is."""
    if tokens.preceding is not None:
        return rows, replace(tokens, preceding=np.minimum(tokens.preceding, tokens.positions % np.int32(chunk)))
    if tokens.each_one:
        return rows, tokens
    appends = np.diff(tokens.qo_indptr).astype(np.int64)
    firsts = tokens.seq_lens - appends
    counts = (tokens.seq_lens - 1) // chunk - firsts // chunk + 1
    total = int(counts.sum())
    if total == rows.size:
        return rows, tokens
    of = np.arange(rows.size).repeat(counts)  # the sequence that each part belongs to
    borders = ragged_range(firsts // chunk, counts) * chunk
    begins, ends = np.maximum(borders, firsts[of]), np.minimum(borders + chunk, tokens.seq_lens[of])
    trees = tokens.trees
    if trees is not None:
        trees = replace(trees, sequences=(np.cumsum(counts) - 1)[trees.sequences])
    owners = np.arange(total).repeat(ends - begins)
    return rows[of], TokenLayout(indptr_of(ends - begins), ends.astype(np.int32), tokens.positions, owners, trees)
