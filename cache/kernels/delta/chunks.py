"""Several new tokens of each of several sequences through convolution and gated delta rule, in four Triton kernels.

The chunk form of the delta rule (Yang et al., arXiv 2406.06484, with decays as in arXiv 2412.06464): what the CHUNK
tokens of a chunk add to a state S is u - w S, where u and w follow from the chunk alone, by the inverse of a triangular
matrix.

    conv_chunks    q, k, v of all tokens; q and k get unit length     a program: a chunk and a head
    solve_chunks   w, u, and scores within the chunk; new tails       a program: a chunk and a value head
    scan_chunks    S from chunk to chunk, and u - w S                 a program: a sequence and columns of a state
    read_chunks    o, from S before each chunk, and within it         a program: a chunk and columns of a value head

Only the third one goes from chunk to chunk: it has two products a chunk, and waits for nothing else. A snapshot may
stand behind any token: a chunk ends there. The first kernel writes its tail, the third one its S.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.cache.kernels.delta.chunk_rows import CHUNK_FIELDS, SEQUENCE_FIELDS, ChunkRows
from tandem.cache.kernels.delta.convolution import conv_chunks
from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.delta.scan import read_chunks, scan_chunks
from tandem.cache.kernels.delta.scratch import Scratch
from tandem.cache.kernels.delta.solve import solve_chunks
from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs
from tandem.cache.kernels.torch.delta_rule import CHUNK, UNIT_EPS
from tandem.cache.kernels.triton.dependent_launch import launch_options

BLOCK = 16  # rows of the diagonal blocks that are inverted row by row
FIELDS = CHUNK_FIELDS, SEQUENCE_FIELDS


class Tiling(NamedTuple):
    """precision: of products. rows: tokens at once of the convolution. solved, scanned, read: columns of a head that a
    program has at once. warps: but for the convolution. stages: of the scan, whose loads are so many chunks ahead."""

    precision: str
    rows: int
    solved: int
    scanned: int
    read: int
    warps: int
    stages: int


# A warp group multiplies 64 rows at once, so the scan has 64 columns of a state.
HALVES = Tiling("tf32", 16, 64, 64, 64, 4, 3)
# Each thread multiplies a part of a product by itself: larger parts of fewer threads do not fit into registers.
FLOATS = Tiling("ieee", 16, 32, 16, 16, 16, 1)


def advance_states(
    pool: Tensor, layer: int, x: RecurrentInputs, shape: DeltaShape, rows: ChunkRows, output: Tensor
) -> None:
    """As step_states, of all tokens of the sequences.

    Products of 16 bits have operands of the dtype of x.mixed, those of float32 are float32. Sums are float32.
    """
    dtype, device, heads = x.mixed.dtype, pool.device, Heads.of(shape)
    count, keys, values = rows.chunks.shape[0], heads.keys, heads.values
    mixed, w, added, scores, states, since, until = Scratch.of(count, heads, dtype, device)
    place, tables = (pool.stride(0), layer * pool.stride(1)), (rows.sequences, rows.chunks)
    tiling, options = FLOATS if dtype == torch.float32 else HALVES, launch_options(device)
    tiled = {"num_warps": tiling.warps, **options}
    kernel: Any = conv_chunks[(count, 2 * heads.key_heads + heads.value_heads)]
    kernel(
        *(x.mixed, x.conv, mixed, pool, *tables, x.mixed.stride(0), *place, UNIT_EPS),
        *(*heads, CHUNK, keys, values, max(keys, values), tiling.rows, *FIELDS),
        **options,
    )
    kernel = solve_chunks[(count, heads.value_heads)]
    kernel(
        *(mixed, x.log_decay, x.strength, w, added, scores, since, until, x.mixed, pool, *tables),
        *(x.log_decay.stride(0), x.strength.stride(0), x.mixed.stride(0), *place, heads.key_dim**-0.5),
        *(*heads, CHUNK, keys, values, min(tiling.solved, keys, values), BLOCK, *FIELDS, tiling.precision),
        **tiled,
    )
    width = min(tiling.scanned, values)
    kernel = scan_chunks[(values // width, heads.value_heads, rows.sequences.shape[0])]
    kernel(
        *(mixed, w, added, since, until, states, pool, *tables, *place, heads.tail * heads.channels),
        *(*heads[:4], CHUNK, keys, values, width, *FIELDS, tiling.precision),
        **tiled,
        num_stages=tiling.stages,
    )
    width = min(tiling.read, values)
    kernel = read_chunks[(values // width, heads.value_heads, count)]
    kernel(
        *(mixed, added, scores, since, states, output, rows.chunks, heads.key_dim**-0.5),
        *(heads.key_heads, heads.value_heads, heads.value_dim, CHUNK, keys, values, width, CHUNK_FIELDS),
        tiling.precision,
        **tiled,
    )
