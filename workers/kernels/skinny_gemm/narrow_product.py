"""Products of few rows with the weights of a narrow layer, and what stands around them, by narrow_product.cu."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import LayerKernels, RowNorm
from tandem.workers.kernels.cuda.cubin_build import load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module

SOURCE = Path(__file__).with_name("narrow_product.cu")
MOST_ROWS = 32
TILE = 16  # rows that a tensor core multiplies at once
WARPS, CHUNK, SPREAD, BARRIER_BYTES = 8, 32, 64, 128  # of narrow_product.cu
RESIDUALS = 32 * WARPS  # pairs of them that a block keeps
SHARED_BYTES = 128 * 1024  # that a block may take: more weights would be waited for
SPLITS = 4  # of columns, where rows are not normed
LEAST_SHARE = 0.75  # of multiprocessors that have a block


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """One of a layer's: `outputs` of rows with `columns`.

    normed: the rows are, before. gated: silu(gate) · up are the outputs, else they are added up. splits: see
    narrow_product.cu.
    """

    name: str
    outputs: int
    columns: int
    normed: bool = False
    gated: bool = False

    @property
    def splits(self) -> int:
        return 1 if self.normed else SPLITS

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.outputs * (1 + self.gated)

    def octets(self, multiprocessors: int) -> int | None:
        """Of weights that each block has, eight rows each; None where it should not be computed so."""
        octets = self.outputs // 8
        fitting = (one for one in range(1, octets) if octets % one == 0)
        each = next((one for one in fitting if octets // one * self.splits <= multiprocessors), octets)
        blocks, weights = octets // each * self.splits, each * (1 + self.gated)
        whole = self.outputs % 8 == 0 and self.columns % (CHUNK * self.splits) == 0
        keeps = self.normed or each * 4 * MOST_ROWS // self.splits <= RESIDUALS
        fits = whole and keeps and self.shared_bytes(weights, MOST_ROWS // TILE) <= SHARED_BYTES
        return weights if fits and blocks >= LEAST_SHARE * multiprocessors else None

    def shared_bytes(self, octets: int, tiles: int) -> int:
        """Product::BYTES of narrow_product.cu."""
        tokens, sets = TILE * tiles, WARPS + (self.splits > 1)
        weights = 8 * octets * (2 * self.columns // self.splits + SPREAD)
        sums = 4 * sets * tokens * 8 * (octets | 1)
        return BARRIER_BYTES + max(weights, sums) + (2 * self.columns + 4 * tokens * WARPS) * self.normed


@dataclass(frozen=True, slots=True)
class NarrowShape:
    """Of a model whose layers have K and V and a gated feed-forward with silu.

    heads: width of all heads of q. qkv: outputs.
    """

    hidden: int
    inner: int
    heads: int
    qkv: int
    dtype: torch.dtype

    @property
    def products(self) -> tuple[NarrowProduct, ...]:
        return (
            NarrowProduct("qkv", self.qkv, self.hidden, normed=True),
            NarrowProduct("o", self.hidden, self.heads),
            NarrowProduct("gate_up", self.inner, self.hidden, normed=True, gated=True),
            NarrowProduct("down", self.hidden, self.inner),
        )

    def defines(self, multiprocessors: int) -> tuple[str, ...] | None:
        """For the compiler; None where not all products should be computed so."""
        octets = {one.name: one.octets(multiprocessors) for one in self.products}
        if self.dtype not in (torch.float16, torch.bfloat16) or None in octets.values():
            return None
        values = {"HIDDEN": self.hidden, "INNER": self.inner, "HEADS": self.heads, "SPLITS": SPLITS}
        values |= {f"{name.upper()}_OCTETS": count for name, count in octets.items() if count is not None}
        values |= {"HALF": int(self.dtype == torch.float16)}
        return tuple(f"-D{name}={value}" for name, value in values.items())


class Arguments(ctypes.Structure):
    """struct Arguments of narrow_product.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "gains", "x", "y")),
        *(("rows", ctypes.c_int), ("outputs", ctypes.c_int), ("eps", ctypes.c_float)),
    )


class NarrowKernels:
    """RowKernels for up to MOST_ROWS rows of a model of one shape. Without biases, and with norms that round where
    LayerKernels' do.
    """

    def __init__(self, cubin: bytes, shape: NarrowShape, multiprocessors: int, kernels: LayerKernels) -> None:
        """For the current device. kernels: for the norm before the head, which is torch's product."""
        module = Module(cubin)
        self._kernels = kernels
        self._launches: dict[tuple[int, int, bool, bool, int], tuple[Function, int]] = {}
        for one in shape.products:
            octets = one.octets(multiprocessors)
            assert octets is not None  # or nothing would have been compiled
            blocks = one.rows // (8 * octets) * one.splits
            for tiles in range(1, MOST_ROWS // TILE + 1):
                shared_bytes = one.shared_bytes(octets, tiles)
                kernel = Function(module, f"{one.name}_{tiles}", 32 * WARPS, shared_bytes, one.splits)
                self._launches[one.rows, one.columns, one.normed, one.gated, tiles] = kernel, blocks

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm | None = None) -> Tensor:
        assert bias is None
        assert norm is not None
        if (*weight.shape, True, False, 1) not in self._launches:
            return F.linear(self._kernels.add_rms_norm(x, None, norm.weight, norm.eps), weight)
        return self._launch(x, weight, x.new_empty((x.shape[0], weight.shape[0])), norm)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm) -> Tensor:
        assert bias is None
        return self._launch(x, weight, x.new_empty((x.shape[0], weight.shape[0] // 2)), norm, gated=True)

    def add_linear(self, total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        assert bias is None
        self._launch(x, weight, total, None)

    def _launch(
        self, x: Tensor, weight: Tensor, output: Tensor, norm: RowNorm | None, *, gated: bool = False
    ) -> Tensor:
        (rows, outputs), (of_weight, columns) = output.shape, weight.shape
        kernel, blocks = self._launches[of_weight, columns, norm is not None, gated, -(-rows // TILE)]
        gains, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        x = x.contiguous()
        pointers = (weight.data_ptr(), gains, x.data_ptr(), output.data_ptr())
        kernel.launch(blocks, (Arguments(*pointers, rows, outputs, eps),))
        return output


def load_narrow_kernels(shape: NarrowShape, device: torch.device, kernels: LayerKernels) -> NarrowKernels | None:
    """None where device or shape does not suit, or, after a warning in the log, where they cannot be compiled."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < (9, 0):
        return None
    defines = shape.defines(properties.multi_processor_count)
    arch = f"{properties.major}{properties.minor}"
    cubin = None if defines is None else load_cubin(SOURCE, defines, arch, "few rows take more kernels")
    return None if cubin is None else NarrowKernels(cubin, shape, properties.multi_processor_count, kernels)
