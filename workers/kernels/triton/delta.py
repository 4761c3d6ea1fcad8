"""DeltaKernels in Triton, a kernel each: for 16 bits on a GPU, where the torch reference launches a dozen a layer."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options

HEADS_PER_PROGRAM = 8


class TritonDelta:
    """See DeltaKernels; results differ from TorchDelta's by the order of sums only."""

    def rates(self, b: Tensor, a: Tensor, decay: Tensor, decay_bias: Tensor) -> tuple[Tensor, Tensor]:
        tokens, groups, each = b.shape
        heads = groups * each
        log_decay = torch.empty((tokens, heads), dtype=torch.float32, device=b.device)
        beta = torch.empty_like(log_decay)
        kernel: Any = _rates[(tokens,)]
        kernel(
            *(b, a, decay, decay_bias, log_decay, beta),
            *(b.stride(0), b.stride(1), a.stride(0), a.stride(1), each, heads, next_power_of_2(heads)),
            **launch_options(b.device),
        )
        return log_decay, beta

    def gate(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, num_heads, head_dim = o.shape
        output = torch.empty((tokens, num_heads * head_dim), dtype=o.dtype, device=o.device)
        heads_each = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
        parts = cdiv(num_heads, heads_each)
        kernel: Any = _gate[(tokens * parts,)]
        kernel(
            *(o, z, weight, output, z.stride(0), z.stride(1), eps, parts, heads_each, num_heads),
            *(num_heads // z.shape[1], head_dim, next_power_of_2(head_dim)),
            **launch_options(o.device),
        )
        return output


@triton.jit
def _rates(
    b, a, decay, decay_bias, log_decay, beta, b_token, b_group, a_token, a_group,
    EACH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has a token. EACH: heads of a group."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = head < HEADS
    group, place = head // EACH, head % EACH
    gate = tl.load(a + token * a_token + group * a_group + place, mask=there, other=0.0).to(tl.float32)
    gate += tl.load(decay_bias + head, mask=there, other=0.0)
    grown = tl.exp(tl.minimum(gate, 20.0))  # softplus is the number itself beyond that, as in torch
    summed = 1.0 + grown
    # log(1 + x) of a small x as exactly as log1p: the last factor undoes what the sum has rounded off.
    log1p = tl.where(summed == 1.0, grown, tl.log(summed) * (grown / tl.where(summed == 1.0, 1.0, summed - 1.0)))
    soft = tl.where(gate > 20.0, gate, log1p)
    places = token * HEADS + head
    tl.store(log_decay + places, tl.load(decay + head, mask=there, other=0.0) * soft, mask=there)
    rate = tl.load(b + token * b_token + group * b_group + place, mask=there, other=0.0).to(tl.float32)
    tl.store(beta + places, (1.0 / (1.0 + tl.exp(-rate))).to(b.dtype.element_ty).to(tl.float32), mask=there)


@triton.jit
def _gate(
    o, z, weight, output, z_token, z_group, eps,
    PARTS: tl.constexpr, HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, EACH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has HEADS heads of one token. EACH: heads of a group of z."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head = tl.program_id(0) % PARTS * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (head < NUM_HEADS) & (column < HEAD_DIM)
    dtype = o.dtype.element_ty
    places = (token * NUM_HEADS + head) * HEAD_DIM + column
    exact = tl.load(o + places, mask=there, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(exact * exact, 1) / HEAD_DIM + eps)
    normed = (exact * inverse[:, None]).to(dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    scaled = (normed * scale).to(dtype).to(tl.float32)
    of_gates = z + token * z_token + head // EACH * z_group + head % EACH * HEAD_DIM + column
    gate = tl.load(of_gates, mask=there, other=0.0).to(tl.float32)
    tl.store(output + places, (scaled * (gate / (1.0 + tl.exp(-gate)))).to(dtype), mask=there)
