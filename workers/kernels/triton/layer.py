"""LayerKernels in Triton, one pass over memory each: for 16 bits on a GPU, where the torch reference makes several."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options

HEADS_PER_PROGRAM = 8
SILU_BLOCK = 1024


class TritonLayerKernels:
    """See LayerKernels; every step rounds where TorchLayerKernels' does, so results differ by the order of sums only.

    x, delta, weight and gate_up must be contiguous; of heads only the last dimension and each token's heads.
    """

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        tokens, hidden = x.shape
        output = torch.empty_like(x)
        block = next_power_of_2(hidden)
        kernel: Any = _add_rms_norm[(tokens,)]
        kernel(
            x=x,
            delta=x if delta is None else delta,
            weight=weight,
            output=output,
            size=tokens * hidden,
            eps=eps,
            HIDDEN=hidden,
            BLOCK=block,
            PARTS=0 if delta is None else delta.shape[0] if delta.dim() == 3 else 1,
            WIDE=delta is not None and delta.dtype != x.dtype,
            ROUND=weight.dtype == x.dtype,
            num_warps=min(max(block // 512, 4), 16),
            **launch_options(x.device),
        )
        return output

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, num_heads, head_dim = heads.shape
        output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
        heads_each = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
        parts = cdiv(num_heads, heads_each)
        kernel: Any = _norm_heads[(tokens * parts,)]
        kernel(
            heads=heads,
            weight=weight,
            output=output,
            token_stride=heads.stride(0),
            num_heads=num_heads,
            eps=eps,
            PARTS=parts,
            HEADS=heads_each,
            HEAD_DIM=head_dim,
            BLOCK=next_power_of_2(head_dim),
            ROUND=weight.dtype == heads.dtype,
            **launch_options(heads.device),
        )
        return output

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        output = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        parts = cdiv(width // 2, SILU_BLOCK)
        kernel: Any = _silu_mul[(tokens * parts,)]
        kernel(
            gate_up=gate_up,
            output=output,
            PARTS=parts,
            WIDTH=width // 2,
            BLOCK=SILU_BLOCK,
            **launch_options(gate_up.device),
        )
        return output

    def clamped_swiglu(self, gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
        tokens, width = gate_up.shape
        output = torch.empty((tokens, width // 2), dtype=gate_up.dtype, device=gate_up.device)
        parts = cdiv(width // 2, SILU_BLOCK)
        kernel: Any = _clamped_swiglu[(tokens * parts,)]
        kernel(
            gate_up=gate_up,
            output=output,
            alpha=alpha,
            limit=float(torch.tensor(limit, dtype=gate_up.dtype)),  # torch rounds it
            PARTS=parts,
            WIDTH=width // 2,
            BLOCK=SILU_BLOCK,
            **launch_options(gate_up.device),
        )
        return output


@triton.jit
def _add_rms_norm(
    x, delta, weight, output, size, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, ROUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a token. PARTS: of delta, `size` numbers each. WIDE: they are float32."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    there = column < HIDDEN
    dtype = x.dtype.element_ty
    value = tl.load(x + row + column, mask=there, other=0.0)
    if PARTS > 0:
        more = tl.load(delta + row + column, mask=there, other=0.0)
        for part in range(1, PARTS):
            more += tl.load(delta + part * size.to(tl.int64) + row + column, mask=there, other=0.0)
        if WIDE:
            more = more.to(dtype)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(dtype)
        tl.store(x + row + column, value, mask=there)
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    exact = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(exact * exact, 0) / HIDDEN + eps)
    normed = exact * inverse
    if ROUND:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(output + row + column, (normed * scale).to(dtype), mask=there)


@triton.jit
def _norm_heads(
    heads, weight, output, token_stride, num_heads, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program has HEADS heads of one token; a token's programs are neighbours."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (head < num_heads) & (column < HEAD_DIM)
    dtype = heads.dtype.element_ty
    exact = tl.load(heads + token * token_stride + head * HEAD_DIM + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(weight + head * HEAD_DIM + column, mask=there, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(exact * exact, 1) / HEAD_DIM + eps)
    normed = exact * inverse[:, None]
    if ROUND:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(output + (token * num_heads + head) * HEAD_DIM + column, (normed * scale).to(dtype), mask=there)


@triton.jit
def _silu_mul(
    gate_up, output, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    dtype = output.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + token * WIDTH + column, (active * up).to(dtype), mask=there)


@triton.jit
def _clamped_swiglu(
    gate_up, output, alpha, limit, PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    column = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    there = column < WIDTH
    dtype = output.dtype.element_ty
    both = gate_up + 2 * (token * WIDTH + column)
    gate = tl.load(both, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + 1, mask=there, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, propagate_nan=tl.PropagateNan.ALL)
    inner = (gate * alpha).to(dtype).to(tl.float32)
    active = (1.0 / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    active = (gate * active).to(dtype).to(tl.float32)
    tl.store(output + token * WIDTH + column, (active * (up + 1.0).to(dtype).to(tl.float32)).to(dtype), mask=there)
