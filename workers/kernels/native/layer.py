"""Kernels of native_layer.c for float32 on a CPU."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.kernels.native.crew import Crew, load_crew

SOURCE = Path(__file__).with_name("native_layer.c")
PANEL = 16  # as in native_layer.c
POINTER, INT32, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class NativeLayerKernels:
    """See LayerKernels; tensors are float32 on the CPU, by the threads of `crew`. Also products with packed weights."""

    def __init__(self, library: ctypes.CDLL, crew: Crew) -> None:
        self._crew = crew.address
        self._linear = library.linear
        self._linear.argtypes = (POINTER, POINTER, INT64, INT32, INT32, POINTER, INT32, POINTER, POINTER)
        self._rms_norm = library.rms_norm
        self._rms_norm.argtypes = (*(POINTER, POINTER, INT64, POINTER, POINTER, INT64), *3 * (INT32,), FLOAT, POINTER)
        self._silu_mul = library.silu_mul
        self._silu_mul.argtypes = (POINTER, POINTER, INT32, INT32, POINTER)
        for function in (self._linear, self._rms_norm, self._silu_mul):
            function.restype = None

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        if not x.is_contiguous():
            raise ValueError(f"x has strides {x.stride()}; contiguous rows are accepted")
        delta = None if delta is None else delta.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(
            *(self._crew, x.data_ptr(), width, None if delta is None else delta.data_ptr(), weight.data_ptr(), 0),
            *(rows, 1, width, eps, out.data_ptr()),
        )
        return out

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, count, width = heads.shape
        heads = heads if heads.stride()[1:] == (width, 1) else heads.contiguous()
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        self._rms_norm(
            *(self._crew, heads.data_ptr(), heads.stride(0), None, weight.data_ptr(), width),
            *(rows, count, width, eps, out.data_ptr()),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width))
        self._silu_mul(self._crew, gate_up.data_ptr(), rows, width, out.data_ptr())
        return out

    def linear(self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias [T, outputs]; x [T, in], packed is pack(weight). A row's bits do not depend on the others.

        ValueError for an x that does not fit.
        """
        rows, inputs = x.shape
        if inputs != packed.shape[1] or x.dtype is not torch.float32:
            raise ValueError(
                f"x is {tuple(x.shape)} of {x.dtype}; {packed.shape[1]} columns of torch.float32 are accepted"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty((rows, outputs))
        self._linear(
            *(self._crew, x.data_ptr(), x.stride(0), rows, inputs, packed.data_ptr()),
            *(outputs, None if bias is None else bias.data_ptr(), y.data_ptr()),
        )
        return y


def pack(weight: Tensor) -> Tensor:
    """[ceil(out / PANEL), in, PANEL] of weight [out, in], float32; outputs that are not there are zeros."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    if outputs % PANEL:
        weight = torch.cat((weight, weight.new_zeros(panels * PANEL - outputs, inputs)))
    return weight.view(panels, PANEL, inputs).transpose(1, 2).contiguous()


@cache
def load_native_layer() -> NativeLayerKernels | None:
    """Once in a process; None where they cannot be built."""
    library, crew = load_library(SOURCE), load_crew()
    return None if library is None or crew is None else NativeLayerKernels(library, crew)
