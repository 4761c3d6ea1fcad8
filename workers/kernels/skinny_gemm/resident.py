"""Skinny GEMMs whose weights are resident in shared memory, and the operations around them: resident.cu.

This file is the home of the constants that host and device share. ResidentShape.defines() gives them to the compiler,
and resident.cu asserts what follows from them.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels, Linear, RmsNorm
from tandem.workers.kernels.cuda.cubin_build import Cubin, defines, load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module

SOURCE = Path(__file__).with_name("resident.cu")
MAX_ROWS = 32
TILE = 16  # rows that a tensor core multiplies at once
WARPS = 8
CHUNK = 32  # columns that a warp multiplies at once
SPREAD = 64  # bytes after a row of weights in shared memory
BARRIER_BYTES = 128
RESIDUALS = 32 * WARPS  # pairs of them that a block keeps
SHARED_BYTES = 128 * 1024  # that a block may take: more weights would be waited for
SPLITS = 4  # of columns, where rows are not normed
MIN_OCCUPIED = 0.75  # of multiprocessors that have a block


@dataclass(frozen=True, slots=True)
class ResidentGemm:
    """One of a layer's GEMMs. Without a norm before, its outputs are added to the residual."""

    name: str
    outputs: int
    columns: int
    normed: bool = False  # the rows, before
    gated: bool = False  # the outputs are silu(gate) · up

    @property
    def splits(self) -> int:
        """Blocks of a cluster, which divide the columns."""
        return 1 if self.normed else SPLITS

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.outputs * (1 + self.gated)

    def octets(self, multiprocessors: int) -> int | None:
        """Octets of weight rows that each block has; None where another kernel suits the GEMM better."""
        octets = self.outputs // 8
        fitting = (one for one in range(1, octets) if octets % one == 0)
        each = next((one for one in fitting if octets // one * self.splits <= multiprocessors), octets)
        blocks, weights = octets // each * self.splits, each * (1 + self.gated)
        whole = self.outputs % 8 == 0 and self.columns % (CHUNK * self.splits) == 0
        keeps = self.normed or each * 4 * MAX_ROWS // self.splits <= RESIDUALS
        fits = whole and keeps and self.shared_bytes(weights, MAX_ROWS // TILE) <= SHARED_BYTES
        return weights if fits and blocks >= MIN_OCCUPIED * multiprocessors else None

    def shared_bytes(self, octets: int, tiles: int) -> int:
        """Shared memory of a block that has so many octets of weight rows and tiles of TILE tokens."""
        tokens, sets = TILE * tiles, WARPS + (self.splits > 1)
        weights = 8 * octets * (2 * self.columns // self.splits + SPREAD)
        sums = 4 * sets * tokens * 8 * (octets | 1)
        return BARRIER_BYTES + max(weights, sums) + (2 * self.columns + 4 * tokens * WARPS) * self.normed


@dataclass(frozen=True, slots=True)
class ResidentShape:
    """The sizes of a model whose layers have K and V and a gated feed-forward with silu."""

    hidden: int
    intermediate: int
    heads: int  # width of all heads of q
    qkv: int  # width of all heads of q, k and v
    dtype: torch.dtype

    @property
    def gemms(self) -> tuple[ResidentGemm, ...]:
        return (
            ResidentGemm("qkv", self.qkv, self.hidden, normed=True),
            ResidentGemm("o", self.hidden, self.heads),
            ResidentGemm("gate_up", self.intermediate, self.hidden, normed=True, gated=True),
            ResidentGemm("down", self.hidden, self.intermediate),
        )

    def defines(self, multiprocessors: int) -> tuple[str, ...] | None:
        """Options for the compiler, which resident.cu explains; None where not all GEMMs fit."""
        if self.dtype not in (torch.float16, torch.bfloat16):
            return None
        of_gemms: dict[str, int] = {}
        for one in self.gemms:
            octets = one.octets(multiprocessors)
            if octets is None:
                return None
            of_gemms[f"{one.name.upper()}_OCTETS"] = octets
            for tiles in range(1, MAX_ROWS // TILE + 1):
                of_gemms[f"{one.name.upper()}_BYTES_{tiles}"] = one.shared_bytes(octets, tiles)
        return defines(
            HIDDEN=self.hidden,
            INTERMEDIATE=self.intermediate,
            HEADS=self.heads,
            HALF=self.dtype == torch.float16,
            SPLITS=SPLITS,
            WARPS=WARPS,
            CHUNK=CHUNK,
            SPREAD=SPREAD,
            BARRIER_BYTES=BARRIER_BYTES,
            HOST_ARGUMENT_BYTES=ctypes.sizeof(ResidentArguments),
            **of_gemms,
        )


class ResidentArguments(ctypes.Structure):
    """struct Arguments of resident.cu: the same fields in the same order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "gains", "x", "y")),
        *(("rows", ctypes.c_int), ("outputs", ctypes.c_int), ("eps", ctypes.c_float)),
    )


class ResidentGemms:
    """FusedGemms for up to MAX_ROWS rows of a model of one shape, without biases. Norms round as LayerKernels' do."""

    def __init__(self, cubin: bytes, shape: ResidentShape, multiprocessors: int, kernels: LayerKernels) -> None:
        """Loads the kernels for the current device. kernels: for the norm before the head, whose GEMM is torch's."""
        module = Module(cubin)
        self._kernels = kernels
        self._launches: dict[tuple[int, int, bool, bool, int], tuple[Function, int]] = {}
        for one in shape.gemms:
            octets = one.octets(multiprocessors)
            assert octets is not None  # or nothing would have been compiled
            blocks = one.rows // (8 * octets) * one.splits
            for tiles in range(1, MAX_ROWS // TILE + 1):
                kernel = Function(
                    module,
                    f"{one.name}_{tiles}",
                    threads=32 * WARPS,
                    shared_bytes=one.shared_bytes(octets, tiles),
                    cluster=one.splits,
                )
                self._launches[one.rows, one.columns, one.normed, one.gated, tiles] = kernel, blocks

    def linear(self, x: Tensor, weights: Linear, norm: RmsNorm | None = None) -> Tensor:
        assert norm is not None
        if (*weights.weight.shape, True, False, 1) not in self._launches:
            return F.linear(self._kernels.add_rms_norm(x, None, norm.weight, norm.eps), weights.weight)
        return self._launch(x, weights, x.new_empty((x.shape[0], weights.weight.shape[0])), norm)

    def linear_silu_mul(self, x: Tensor, weights: Linear, norm: RmsNorm) -> Tensor:
        return self._launch(x, weights, x.new_empty((x.shape[0], weights.weight.shape[0] // 2)), norm, gated=True)

    def add_linear(self, residual: Tensor, x: Tensor, weights: Linear) -> None:
        self._launch(x, weights, residual, None)

    def _launch(
        self, x: Tensor, weights: Linear, output: Tensor, norm: RmsNorm | None, *, gated: bool = False
    ) -> Tensor:
        assert weights.bias is None
        (rows, outputs), (of_weight, columns) = output.shape, weights.weight.shape
        kernel, blocks = self._launches[of_weight, columns, norm is not None, gated, -(-rows // TILE)]
        x = x.contiguous()
        gains, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        tensors = (weights.weight.data_ptr(), gains, x.data_ptr(), output.data_ptr())
        kernel.launch(blocks, (ResidentArguments(*tensors, rows, outputs, eps),))
        return output


def load_resident_gemms(shape: ResidentShape, device: torch.device, kernels: LayerKernels) -> ResidentGemms | None:
    """None where device or shape does not suit, or, after a warning in the log, where they cannot be compiled."""
    properties = torch.cuda.get_device_properties(device)
    planned = plan_resident_gemms(shape, (properties.major, properties.minor), properties.multi_processor_count)
    cubin = None if planned is None else load_cubin(planned, "few rows take more kernels")
    return None if cubin is None else ResidentGemms(cubin, shape, properties.multi_processor_count, kernels)


def plan_resident_gemms(shape: ResidentShape, capability: tuple[int, int], multiprocessors: int) -> Cubin | None:
    """Returns the cubin to compile for a GPU; None where device or shape does not suit."""
    options = shape.defines(multiprocessors) if capability >= (9, 0) else None
    return None if options is None else Cubin(SOURCE, options, "".join(map(str, capability)))
