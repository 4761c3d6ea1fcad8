"""Cuts the new tokens of a forward into chunks. Needs no Triton."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from tandem.cache.kernels.torch.delta_rule import CHUNK
from tandem.cache.plan.arrays import Int32Array, Int64Array, IntArray, ragged_range

CHUNK_FIELDS, SEQUENCE_FIELDS = 4, 6
NO_PAGE = -1


class ChunkRows(NamedTuple):
    """int32 on the device. Ends are exclusive.

    sequences [n, SEQUENCE_FIELDS]: page; whether the sequence has earlier tokens; first token and end; first chunk and
    end. chunks [m, CHUNK_FIELDS]: sequence; first token and end; page of the snapshot after the chunk, or NO_PAGE.
    """

    sequences: Tensor
    chunks: Tensor


class Cuts(NamedTuple):
    """c snapshots within the new tokens of n sequences, int64 [c] each: the state of sequences[i] before the forward's
    token tokens[i] goes to pages[i]."""

    sequences: Int64Array
    tokens: Int64Array
    pages: Int64Array


def lay_out_chunks(
    pages: IntArray, behind: IntArray, begins: IntArray, ends: IntArray, cuts: Cuts
) -> tuple[Int32Array, Int32Array]:
    """The arrays of ChunkRows for n sequences; arguments are [n] each. A chunk has CHUNK tokens, or fewer before a
    snapshot or at the end of its sequence."""
    owners = np.concatenate((np.arange(begins.size), cuts.sequences))
    stops, kept = np.concatenate((ends, cuts.tokens)), np.concatenate((np.full(begins.size, NO_PAGE), cuts.pages))
    order = np.lexsort((-kept, stops, owners))
    owners, stops, kept = owners[order], stops[order], kept[order]
    is_first = np.diff(owners, prepend=-1) > 0
    starts = np.where(is_first, begins[owners], np.roll(stops, 1))
    there = starts < stops  # a snapshot after the last token leaves no piece after it
    owners, starts, stops, kept = owners[there], starts[there], stops[there], kept[there]
    counts = -(-(stops - starts) // CHUNK)
    pieces = np.repeat(np.arange(counts.size), counts)
    firsts = starts[pieces] + ragged_range(np.zeros_like(counts), counts) * CHUNK
    lasts = np.minimum(firsts + CHUNK, stops[pieces])
    chunks = np.stack((owners[pieces], firsts, lasts, np.where(lasts == stops[pieces], kept[pieces], NO_PAGE)), 1)
    borders = np.searchsorted(chunks[:, 0], np.arange(begins.size + 1))
    sequences = np.stack((pages, behind, begins, ends, borders[:-1], borders[1:]), 1)
    return sequences.astype(np.int32), chunks.astype(np.int32)
