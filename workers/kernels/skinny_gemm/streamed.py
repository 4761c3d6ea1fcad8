"""Skinny GEMMs whose weights stream through shared memory, by streamed.cu, and the choice of its tiling.

This file is the home of the constants that host and device share. streamed_defines() gives them to the compiler.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.kernels.cuda.cubin_build import Cubin, defines, load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module, TensorMap

SOURCE = Path(__file__).with_name("streamed.cu")
HOPPER = (9, 0)  # has the instructions, and no later one
SLAB = 64  # columns at once
ALIGNMENT = 1024  # of the ring in shared memory
MAX_WASTE = 1.3  # of a tiling: rows of weights that the busiest multiprocessor has, to a fair share
FEW = 32  # rows with which one GEMM of torch's, which cannot start early, costs more than ours gain: decision 0036
MAPS = 1024  # of inputs, kept


@dataclass(frozen=True, slots=True)
class Tiling:
    """The work of a block of one kernel."""

    height: int  # rows of weights of a block
    min_tokens: int
    tokens: int  # at most
    splits: int  # blocks of a cluster, which divide the columns
    room: int  # KiB of shared memory for its ring
    gated: bool  # rows of weights are gates, then as many ups

    @property
    def kernel(self) -> str:
        return f"streamed_gemm_{self.height}_{self.tokens}_{self.splits}_{int(self.gated)}"

    @property
    def definition(self) -> str:
        """The kernel, for streamed.cu."""
        return f"KERNEL({self.height}, {self.tokens}, {self.splits}, {self.room}, {int(self.gated)})"

    @property
    def shared_bytes(self) -> int:
        return self.room * 1024 + ALIGNMENT

    @property
    def threads(self) -> int:
        """Threads of a block: its warpgroups, one for up to 64 tokens, and the warp that fetches."""
        return 2 * max(self.tokens, 64) + 32

    def waste(self, rows: int, columns: int, multiprocessors: int) -> float:
        """See MAX_WASTE, for weights [rows, columns]. Infinite where they do not fit, or need too many blocks."""
        blocks = -(-rows // self.height) * self.splits
        if columns % (SLAB * self.splits) or rows % 16 or blocks > multiprocessors:
            return float("inf")
        return self.height / self.splits * multiprocessors / rows


# By measurement, see decision 0036. Each room is more than half a multiprocessor's: two blocks on one while another has
# none cost more than fetching ahead gains.
TILINGS = (
    Tiling(192, 2, 16, 1, 224, gated=True),
    Tiling(96, 2, 16, 2, 160, gated=False),
    Tiling(64, 2, 16, 2, 128, gated=False),
    Tiling(192, 17, 32, 1, 224, gated=True),
    Tiling(96, 17, 32, 2, 160, gated=False),
    Tiling(64, 17, 32, 2, 128, gated=False),
    Tiling(192, 33, 64, 1, 224, gated=True),
    Tiling(96, 33, 64, 2, 160, gated=False),
    Tiling(64, 33, 64, 2, 128, gated=False),
    Tiling(192, 97, 128, 1, 200, gated=True),
    Tiling(64, 97, 128, 2, 192, gated=False),
)

TOKENS = sorted({tiling.tokens for tiling in TILINGS})


def choose_tiling(rows: int, columns: int, multiprocessors: int, *, tokens: int, gated: bool) -> Tiling | None:
    """The tiling for weights [rows, columns] with the least waste; None where all waste too much."""
    fitting = [one for one in TILINGS if one.tokens == tokens and one.gated == gated]
    best = min(fitting, key=lambda one: one.waste(rows, columns, multiprocessors), default=None)
    return best if best is not None and best.waste(rows, columns, multiprocessors) <= MAX_WASTE else None


def streamed_defines(dtype: torch.dtype) -> tuple[str, ...]:
    """Options for the compiler, which streamed.cu explains."""
    kernels = " ".join(one.definition for one in TILINGS)
    return defines(HALF=dtype == torch.float16, SLAB=SLAB, RING_ALIGNMENT=ALIGNMENT, KERNELS=kernels)


class StreamedGemms:
    """The kernels of all tilings, for one dtype of 16 bits and the current device."""

    def __init__(self, cubin: bytes, dtype: torch.dtype, multiprocessors: int) -> None:
        self.dtype = dtype
        self.multiprocessors = multiprocessors
        self.module = Module(cubin)
        self._functions = {
            one: Function(
                self.module, one.kernel, threads=one.threads, shared_bytes=one.shared_bytes, cluster=one.splits
            )
            for one in TILINGS
        }
        self._map_inputs = lru_cache(MAPS)(self._make_map)

    def prepare(self, weight: Tensor, *, gated: bool) -> "StreamedGemm | None":
        """Prepares a weight; None where no tiling suits it."""
        rows, columns = weight.shape
        tilings = [choose_tiling(rows, columns, self.multiprocessors, tokens=tokens, gated=gated) for tokens in TOKENS]
        chosen = [one for one in tilings if one is not None]
        return StreamedGemm(self, weight, chosen) if chosen and weight.is_contiguous() else None

    def launch(self, tiling: Tiling, weights: TensorMap, x: Tensor, output: Tensor) -> None:
        (rows, columns), outputs = x.shape, output.shape[1]
        inputs = self._map_inputs(x.data_ptr(), rows, columns, tiling.tokens)
        tiles = -(-outputs * (2 if tiling.gated else 1) // tiling.height)
        numbers = map(ctypes.c_int, (rows, outputs, columns))
        y = ctypes.c_void_p(output.data_ptr())
        self._functions[tiling].launch(tiles * tiling.splits, (weights, inputs, y, *numbers))

    def _make_map(self, address: int, rows: int, columns: int, tokens: int) -> TensorMap:
        return self.module.tensor_map(address, self.dtype, (columns, rows), (2 * columns,), (SLAB, tokens))


class StreamedGemm:
    """x [T, in] → x · weightᵀ [T, out] for one weight [out, in]; takes() says for which x.

    Gated: silu(gate) · up [T, out / 2] of its halves, gate first, rounded where LayerKernels.silu_mul rounds.
    """

    def __init__(self, gemms: StreamedGemms, weight: Tensor, tilings: list[Tiling]) -> None:
        """tilings: by ascending tokens."""
        self._gemms = gemms
        self._tilings = tilings
        self._outputs = weight.shape[0] // 2 if tilings[0].gated else weight.shape[0]
        self._chained = False
        self._weight = weight  # maps point to it
        self._maps = [self._map_weight(tiling) for tiling in tilings]

    def takes(self, x: Tensor) -> bool:
        rows = x.shape[0]
        fitting = any(one.min_tokens <= rows <= one.tokens for one in self._tilings)
        return x.is_contiguous() and fitting and (self._chained or rows > FEW)

    @staticmethod
    def chain(gemms: Sequence["StreamedGemm | None"]) -> None:
        """gemms: all of a layer's. If all are streamed, they take a FEW rows too."""
        chained = [one for one in gemms if one is not None]
        if len(chained) == len(gemms):
            for one in chained:
                one._chained = True

    def __call__(self, x: Tensor) -> Tensor:
        index = next(index for index, one in enumerate(self._tilings) if x.shape[0] <= one.tokens)
        output = torch.empty((x.shape[0], self._outputs), dtype=x.dtype, device=x.device)
        self._gemms.launch(self._tilings[index], self._maps[index], x, output)
        return output

    def _map_weight(self, tiling: Tiling) -> TensorMap:
        """Blocks of 16 rows, as [16 … rows / 16, 2, 8, columns]: neighbours, or 8 gates and their ups."""
        rows, columns = self._weight.shape
        line = 2 * columns
        halves, blocks = (rows // 2 * line, 8 * line) if tiling.gated else (8 * line, 16 * line)
        return self._gemms.module.tensor_map(
            self._weight.data_ptr(),
            self._weight.dtype,
            (columns, 8, 2, rows // 16),
            (line, halves, blocks),
            (SLAB, 8, 2, tiling.height // 16),
        )


@lru_cache
def load_streamed_gemms(device: torch.device, dtype: torch.dtype) -> StreamedGemms | None:
    """None where the device or dtype does not suit, or, after a warning in the log, where they cannot be compiled."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    planned = plan_streamed_gemms(dtype, (properties.major, properties.minor))
    cubin = None if planned is None else load_cubin(planned, "torch multiplies all rows")
    return None if cubin is None else StreamedGemms(cubin, dtype, properties.multi_processor_count)


def plan_streamed_gemms(dtype: torch.dtype, capability: tuple[int, int]) -> Cubin | None:
    """Returns the cubin to compile for a GPU; None where the GPU or the dtype does not suit."""
    suits = capability == HOPPER and dtype in (torch.float16, torch.bfloat16)
    return Cubin(SOURCE, streamed_defines(dtype), "90a") if suits else None
