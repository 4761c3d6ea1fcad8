"""Prompts of recurrent layers: convolution and state update of many tokens of each sequence, in three Triton kernels.

This is the chunked form of the delta rule (Yang et al., arXiv 2406.06484, with decays as in arXiv 2412.06464). The
CHUNK tokens of a chunk add u - w S to a state S. u and w depend on the chunk only, through the inverse of a triangular
matrix. Mamba-2 has no w, and each token's u depends on that token only.

    conv_chunks    q, k, v of all tokens                              a program: a chunk and a head
    solve_chunks   w, u, and scores within the chunk; new tails       a program: a chunk and a value head
    scan_chunks    o, and S from chunk to chunk                       a program: a sequence and columns of a state

Only the last kernel runs sequentially over chunks. A snapshot may follow any token, and ends a chunk there. The first
kernel writes the snapshot's tail, the last one its S.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.cache.kernels.delta.chunk_rows import CHUNK_FIELDS, SEQUENCE_FIELDS, ChunkRows
from tandem.cache.kernels.delta.convolution import conv_chunks
from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.delta.scan import scan_chunks
from tandem.cache.kernels.delta.scratch import Scratch
from tandem.cache.kernels.delta.solve import solve_chunks
from tandem.cache.kernels.delta.solve_rows import solve_row_chunks
from tandem.cache.kernels.recurrent import RecurrentInputs, StateShape
from tandem.cache.kernels.torch.delta_rule import CHUNK, UNIT_EPS
from tandem.cache.kernels.triton.dependent_launch import launch_options

LEVELS = CHUNK.bit_length() - 1
FIELDS = CHUNK_FIELDS, SEQUENCE_FIELDS


class Tiling(NamedTuple):
    """precision: of products. rows: tokens that the convolution handles at once. solved, scanned: columns of a head
    that a program of the solve and scan kernels handles at once. warps: of each program. row_solved, row_warps: the
    same for solve_row_chunks. stages: pipeline stages of the scan's loads.
    """

    precision: str
    rows: int
    solved: int
    row_solved: int
    scanned: int
    warps: int
    row_warps: int
    stages: int


# A warp group multiplies 64 rows at once, so the scan has 64 columns of a state.
HALVES = Tiling("tf32", 16, 128, 32, 64, 4, 8, 3)
# Each thread multiplies a part of a product by itself: larger parts of fewer threads do not fit into registers.
FLOATS = Tiling("ieee", 32, 32, 32, 16, 16, 16, 1)


def advance_states(
    pool: Tensor, layer: int, x: RecurrentInputs, shape: StateShape, rows: ChunkRows, output: Tensor
) -> None:
    """The same as step_states, for all new tokens of the sequences.

    Products have operands in the dtype of x.mixed and accumulate in float32.
    """
    dtype, device, heads = x.mixed.dtype, pool.device, Heads.of(shape)
    scratch = Scratch.of(rows.chunks.shape[0], heads, dtype, device)
    tiling = FLOATS if dtype == torch.float32 else HALVES
    launch = Launch(
        heads, scratch, rows, tiling, (pool, pool.stride(0), layer * pool.stride(1)), launch_options(device)
    )
    launch.convolve(x)
    launch.solve(x)
    launch.scan(x.skip, output)


class Launch(NamedTuple):
    """The launch of one layer's kernels. entries: the pool, and the strides of pages and of this layer."""

    heads: Heads
    scratch: Scratch
    rows: ChunkRows
    tiling: Tiling
    entries: tuple[Tensor, int, int]
    options: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, int, int]:
        return CHUNK, self.heads.keys, self.heads.values

    def convolve(self, x: RecurrentInputs) -> None:
        heads, (pool, *places), width = self.heads, self.entries, max(self.heads.keys, self.heads.values)
        kernel: Any = conv_chunks[(self.rows.chunks.shape[0], 2 * heads.key_heads + heads.value_heads)]
        kernel(
            *(x.mixed, x.conv, x.conv_bias, self.scratch.mixed, pool, *self.rows, x.mixed.stride(0), *places, UNIT_EPS),
            *(*heads, *self.sizes, width, self.tiling.rows, *FIELDS),
            **self.options,
        )

    def solve(self, x: RecurrentInputs) -> None:
        heads, (pool, *places), own, tiling = self.heads, self.entries, self.scratch, self.tiling
        exact = (own.since,) if heads.by_row else (own.since, own.until)
        kernel: Any = (solve_row_chunks if heads.by_row else solve_chunks)[self.rows.chunks.shape[0], heads.value_heads]
        width = min(tiling.row_solved if heads.by_row else tiling.solved, heads.keys, heads.values)
        kernel(
            *(own.mixed, x.log_decay, x.strength, own.w, own.added, own.scores, *exact, x.mixed, pool, *self.rows),
            *(x.log_decay.stride(0), x.strength.stride(0), x.mixed.stride(0), *places, heads.scale),
            *(*heads, *self.sizes, width, LEVELS, *FIELDS, tiling.precision),
            num_warps=tiling.row_warps if heads.by_row else tiling.warps,
            num_stages=1,
            **self.options,
        )

    def scan(self, skip: Tensor | None, output: Tensor) -> None:
        heads, (pool, *places), own, tiling = self.heads, self.entries, self.scratch, self.tiling
        width = min(tiling.scanned, heads.values)
        kernel: Any = scan_chunks[heads.values // width, heads.value_heads, self.rows.sequences.shape[0]]
        kernel(
            *(own.mixed, own.w, own.added, own.scores, own.since, own.until, skip, output, pool, *self.rows, *places),
            *(heads.scale, heads.state_at, *heads[:4], heads.is_delta, heads.by_row, *self.sizes, width, *FIELDS),
            tiling.precision,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **self.options,
        )
