"""Kernels of native_layer.c for float32 on a CPU."""

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.kernels.native.crew import Crew, load_crew
from tandem.workers.kernels.base import Linear, ScaledLinear
from tandem.workers.kernels.torch.layer import TorchLayerKernels

SOURCE = Path(__file__).with_name("native_layer.c")
PANEL = 16  # outputs that native_layer.c multiplies at once; checked when it is loaded
POINTER, INT32, INT64, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
# The functions of native_layer.c: their parameters, in order.
LINEAR = {
    **{"crew": POINTER, "x": POINTER, "x_stride": INT64, "rows": INT32, "inputs": INT32, "packed": POINTER},
    **{"outputs": INT32, "bias": POINTER, "y": POINTER},
}
SCALED_LINEAR = {
    **{"crew": POINTER, "x": POINTER, "x_stride": INT64, "rows": INT32, "inputs": INT32, "numbers": POINTER},
    **{"scales": POINTER, "group": INT32, "groups": INT32, "outputs": INT32, "bias": POINTER, "y": POINTER},
}
RMS_NORM = {
    **{"crew": POINTER, "x": POINTER, "stride": INT64, "delta": POINTER, "weight": POINTER, "weight_stride": INT64},
    **{"rows": INT32, "heads": INT32, "width": INT32, "eps": FLOAT, "out": POINTER},
}
SILU_MUL = {"crew": POINTER, "gate_up": POINTER, "rows": INT32, "width": INT32, "out": POINTER}


class NativeLayerKernels:
    """See LayerKernels; tensors are float32 on the CPU, by the threads of `crew`. Also products with packed weights."""

    def __init__(self, library: ctypes.CDLL, crew: Crew) -> None:
        self._crew = crew.address
        self._linear = _function(library, "linear", LINEAR)
        self._scaled_linear = _function(library, "scaled_linear", SCALED_LINEAR)
        self._rms_norm = _function(library, "rms_norm", RMS_NORM)
        self._silu_mul = _function(library, "silu_mul", SILU_MUL)

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous():
            raise ValueError(f"x has strides {x.stride()}; its rows must be contiguous")
        return self._normalize(x, 1, None if delta is None else delta.contiguous(), weight, eps)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        _, count, width = heads.shape
        heads = heads if heads.stride()[1:] == (width, 1) else heads.contiguous()
        return self._normalize(heads, count, None, weight, eps)

    def _normalize(self, x: Tensor, heads: int, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._rms_norm(
            crew=self._crew,
            x=x.data_ptr(),
            stride=x.stride(0),
            delta=None if delta is None else delta.data_ptr(),
            weight=weight.data_ptr(),
            weight_stride=weight.stride(0),
            rows=x.shape[0],
            heads=heads,
            width=x.shape[-1],
            eps=eps,
            out=out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width))
        self._silu_mul(crew=self._crew, gate_up=gate_up.data_ptr(), rows=rows, width=width, out=out.data_ptr())
        return out

    def clamped_swiglu(self, gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
        return TorchLayerKernels().clamped_swiglu(gate_up, alpha=alpha, limit=limit)

    def linear(self, x: Tensor, packed: Linear, outputs: int) -> Tensor:
        """x · weightᵀ + bias [T, outputs]; x [T, in], packed has pack(weight) and the bias. A row's bits do not depend
        on the others.

        ValueError for an x that does not fit.
        """
        (rows, inputs), weight, bias = x.shape, packed.weight, packed.bias
        if inputs != weight.shape[1] or x.dtype is not torch.float32:
            raise ValueError(
                f"x is {tuple(x.shape)} of {x.dtype}; it must have {weight.shape[1]} columns of torch.float32"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty((rows, outputs))
        self._linear(
            crew=self._crew,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            rows=rows,
            inputs=inputs,
            packed=weight.data_ptr(),
            outputs=outputs,
            bias=None if bias is None else bias.data_ptr(),
            y=y.data_ptr(),
        )
        return y

    def scaled_linear(self, x: Tensor, packed: ScaledLinear, outputs: int) -> Tensor:
        """linear() by a weight in 8 bits: packed has pack() of the numbers, as uint8, and of the scales of all rows."""
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty((x.shape[0], outputs))
        self._scaled_linear(
            crew=self._crew,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            rows=x.shape[0],
            inputs=x.shape[1],
            numbers=packed.weight.data_ptr(),
            scales=packed.scales.data_ptr(),
            group=packed.group,
            groups=packed.scales.shape[1],
            outputs=outputs,
            bias=None if packed.bias is None else packed.bias.data_ptr(),
            y=y.data_ptr(),
        )
        return y


def _function(library: ctypes.CDLL, name: str, parameters: Mapping[str, Any]) -> Callable[..., None]:
    """Wraps a function of the library so that it takes arguments by name."""
    prototype = ctypes.CFUNCTYPE(None, *parameters.values())
    return prototype((name, library), tuple((1, parameter) for parameter in parameters))


def pack(weight: Tensor) -> Tensor:
    """[ceil(out / PANEL), in, PANEL] of weight [out, in]; outputs that are not there are zeros."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    if outputs % PANEL:
        weight = torch.cat((weight, weight.new_zeros(panels * PANEL - outputs, inputs)))
    return weight.view(panels, PANEL, inputs).transpose(1, 2).contiguous()


@cache
def load_native_layer() -> NativeLayerKernels | None:
    """Loads the kernels, once in a process; None where they cannot be built."""
    library, crew = load_library(SOURCE), load_crew()
    if library is None or crew is None:
        return None
    if (panel := ctypes.c_int32.in_dll(library, "panel").value) != PANEL:
        raise RuntimeError(f"{SOURCE.name} has panels of {panel} outputs, native/layer.py of {PANEL}")
    return NativeLayerKernels(library, crew)
