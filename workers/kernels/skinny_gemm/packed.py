"""Skinny GEMMs of weights in 4 bits by packed.cu, and the choice of its tiling.

This file is the home of the constants that host and device share. packed_defines() gives them to the compiler.
"""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.kernels.cuda.cubin_build import Cubin, defines, load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.packed_linear import PackedKernels, PackedLinear

SOURCE = Path(__file__).with_name("packed.cu")
LEAST = (9, 0)  # has all that it needs, and so have later ones
WARPS = 8  # of a block
UNIT = 32  # columns of a thread
OCTETS = (1, 2, 4)  # of tokens
MAX_TOKENS = 64
TALL = 8192  # rows of weights, times blocks of tokens, from which a block has more of them
FEW_PAIRS = 4  # of an expert, in the mean, with which most have an octet at most


@dataclass(frozen=True, slots=True)
class Tiling:
    """The work of a block."""

    tiles: int  # of 16 rows of weights
    octets: int  # of tokens, at most
    is_float: bool

    @property
    def kernel(self) -> str:
        return f"packed_gemm_{self.tiles}_{self.octets}_{int(self.is_float)}"

    @property
    def shared_bytes(self) -> int:
        """The bytes of the warps' sums."""
        return 4 * WARPS * 16 * self.tiles * (8 * self.octets + 1)

    @property
    def definition(self) -> str:
        """The kernel, for packed.cu."""
        return f"KERNEL({self.tiles}, {self.octets}, {int(self.is_float)})"


def tilings(dtype: torch.dtype) -> list[Tiling]:
    """Returns all tilings. Numbers of E2M1 become numbers of bfloat16 only."""
    forms = (False, True) if dtype == torch.bfloat16 else (False,)
    return [Tiling(tiles, octets, is_float) for tiles in (1, 2) for octets in OCTETS for is_float in forms]


def packed_defines(dtype: torch.dtype) -> tuple[str, ...]:
    """Options for the compiler, which packed.cu explains."""
    kernels = " ".join(one.definition for one in tilings(dtype))
    return defines(HALF=dtype == torch.float16, WARPS=WARPS, KERNELS=kernels)


class Arguments(ctypes.Structure):
    """See packed.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "numbers", "scales", "zeros", "bias", "factors", "y")),
        *((name, ctypes.c_void_p) for name in ("pairs", "experts")),
        *((name, ctypes.c_int) for name in ("num_pairs", "num_experts", "num_blocks", "width", "rows", "columns")),
        *((name, ctypes.c_int) for name in ("groups", "x_row", "fan_out", "shift")),
    )


class PackedGemms:
    """See PackedKernels: the kernels of all tilings, for one dtype of 16 bits and the current device, and others where
    none serves."""

    def __init__(self, cubin: bytes, dtype: torch.dtype, others: PackedKernels) -> None:
        self._dtype, self._others, module = dtype, others, Module(cubin)
        self._functions = {
            one: Function(module, one.kernel, threads=32 * WARPS, shared_bytes=one.shared_bytes)
            for one in tilings(dtype)
        }

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        tokens = x.shape[0]
        if not 0 < tokens <= MAX_TOKENS or not self._takes(x, weights):
            return self._others.linear(x, weights)
        y = torch.empty(tokens, weights.rows, dtype=x.dtype, device=x.device)
        octets = next((one for one in OCTETS if tokens <= 8 * one), OCTETS[-1])
        num_blocks = -(-tokens // (8 * octets))
        self._launch(
            x, weights, y, octets, Arguments(num_pairs=tokens, num_experts=1, num_blocks=num_blocks, fan_out=1)
        )
        return y

    def grouped(
        self, x: Tensor, weights: PackedLinear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int
    ) -> Tensor:
        (num_blocks, width), num_experts = blocks.pairs.shape, weights.numbers.shape[0]
        if width % 16 or not num_blocks or not self._takes(x, weights):
            return self._others.grouped(x, weights, blocks, scale, fan_out)
        octets = 1 if blocks.num_pairs <= FEW_PAIRS * num_experts else 2 if width % 32 else 4
        y = torch.empty(blocks.num_pairs, weights.rows, dtype=x.dtype, device=x.device)
        arguments = Arguments(
            factors=_address(scale),
            pairs=blocks.pairs.data_ptr(),
            experts=blocks.experts.data_ptr(),
            num_pairs=blocks.num_pairs,
            num_experts=num_experts,
            num_blocks=num_blocks * width // (8 * octets),
            width=width,
            fan_out=fan_out,
        )
        self._launch(x, weights, y, octets, arguments)
        return y

    def _takes(self, x: Tensor, weights: PackedLinear) -> bool:
        units, rest = divmod(weights.group_size, UNIT)
        even = weights.scales.shape[-1] == 1 or (not rest and units & (units - 1) == 0)
        aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weights.columns % UNIT == 0
        known = not weights.is_float or self._dtype == torch.bfloat16
        return x.dtype == self._dtype and weights.groups is None and x.stride(1) == 1 and even and aligned and known

    def _launch(self, x: Tensor, weights: PackedLinear, y: Tensor, octets: int, arguments: Arguments) -> None:
        num_blocks = arguments.num_blocks
        tiling = Tiling(1 if weights.rows * num_blocks < TALL else 2, octets, weights.is_float)
        groups = weights.scales.shape[-1]
        arguments.x, arguments.y, arguments.x_row = x.data_ptr(), y.data_ptr(), x.stride(0)
        arguments.numbers, arguments.scales = weights.numbers.data_ptr(), weights.scales.data_ptr()
        arguments.zeros, arguments.bias = _address(weights.zeros), _address(weights.bias)
        arguments.rows, arguments.columns, arguments.groups = weights.rows, weights.columns, groups
        arguments.shift = 30 if groups == 1 else (weights.group_size // UNIT).bit_length() - 1
        self._functions[tiling].launch(-(-weights.rows // (16 * tiling.tiles)) * num_blocks, (arguments,))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@lru_cache
def load_packed_gemms(device: torch.device, dtype: torch.dtype, others: PackedKernels) -> PackedKernels:
    """The others alone where the device or dtype does not suit, or, after a warning in the log, where these cannot be
    compiled."""
    planned = plan_packed_gemms(dtype, torch.cuda.get_device_capability(device))
    cubin = None if planned is None else load_cubin(planned, "Triton multiplies all rows of packed weights")
    return others if cubin is None else PackedGemms(cubin, dtype, others)


def plan_packed_gemms(dtype: torch.dtype, capability: tuple[int, int]) -> Cubin | None:
    """Returns the cubin to compile for a GPU; None where the GPU or the dtype does not suit."""
    suits = capability >= LEAST and dtype in (torch.float16, torch.bfloat16)
    return Cubin(SOURCE, packed_defines(dtype), "".join(map(str, capability))) if suits else None
