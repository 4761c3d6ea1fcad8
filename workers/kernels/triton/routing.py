"""Routing of few tokens to experts, a kernel a step: the choice of each token's experts, and their blocks of pairs.

In torch these are some twenty kernels, each shorter than its launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.workers.kernels.expert_blocks import ExpertBlocks, block_bound

CHUNK = 32  # experts, and pairs, that are compared with all pairs at once
MAX_PAIRS = 512  # of one program


def choose_experts(logits: Tensor, top_k: int, *, normalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """weights float32 and experts int64, [T, top_k] each, the best first: the largest softmax of logits [T, E]."""
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    kernel: Any = _choose_experts[(tokens,)]
    kernel(
        logits=logits,
        weights=weights,
        experts=experts,
        logits_row=logits.stride(0),
        num_experts=num_experts,
        scale=scale,
        TOP_K=top_k,
        SLOTS=next_power_of_2(top_k),
        EXPERTS=next_power_of_2(num_experts),
        NORMALIZE=normalize,
        num_warps=1 if num_experts <= 256 else 4,
        **launch_options(logits.device),
    )
    return weights, experts


def sort_pairs(experts: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    """See expert_blocks(): of at most MAX_PAIRS pairs, by one program."""
    num_pairs = experts.numel()
    bound = block_bound(num_pairs, num_experts, rows)
    pairs = torch.empty(bound, rows, dtype=torch.int32, device=experts.device)
    owners = torch.empty(bound, dtype=torch.int32, device=experts.device)
    kernel: Any = _sort_pairs[(1,)]
    kernel(
        chosen=experts.contiguous(),
        pairs=pairs,
        owners=owners,
        num_pairs=num_pairs,
        num_experts=num_experts,
        bound=bound,
        ROWS=rows,
        PAIRS=next_power_of_2(num_pairs),
        BLOCKS=next_power_of_2(bound),
        CHUNK=CHUNK,
        num_warps=8 if num_pairs > 64 else 4,
        **launch_options(experts.device),
    )
    return ExpertBlocks(pairs, owners, num_pairs)


@triton.jit
def _choose_experts(
    logits, weights, experts, logits_row, num_experts, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a token. Of equal logits the first expert is the better."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    lowest = float("-inf")
    logit = tl.load(logits + token * logits_row + expert, mask=expert < num_experts, other=lowest).to(tl.float32)
    size = tl.exp(logit - tl.max(logit, 0))
    total = tl.sum(size, 0)
    left = tl.where(logit == logit, logit, lowest)  # experts are numbers even where logits are none
    kept = tl.zeros((SLOTS,), dtype=tl.float32)
    chosen = tl.zeros((SLOTS,), dtype=tl.int32)
    for place in tl.static_range(TOP_K):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.argmax(left, 0)
        kept = tl.where(slot == place, tl.sum(tl.where(expert == best, size, 0.0), 0), kept)
        chosen = tl.where(slot == place, best, chosen)
        left = tl.where(expert == best, lowest, left)
    kept = kept / total
    if NORMALIZE:
        kept = kept / tl.sum(kept, 0)
    at = token * TOP_K + slot
    tl.store(weights + at, kept * scale, mask=slot < TOP_K)
    tl.store(experts + at, chosen.to(tl.int64), mask=slot < TOP_K)


@triton.jit(do_not_specialize=["num_pairs", "bound"])  # they differ from step to step
def _sort_pairs(
    chosen, pairs, owners, num_pairs, num_experts, bound,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair stands where its expert's blocks begin, after the expert's earlier pairs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, block, some = tl.arange(0, PAIRS), tl.arange(0, BLOCKS), tl.arange(0, CHUNK)
    own = tl.load(chosen + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    place = tl.zeros((PAIRS,), dtype=tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        other = begin + some
        theirs = tl.load(chosen + other, mask=other < num_pairs, other=-2).to(tl.int32)
        earlier = (theirs[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(earlier.to(tl.int32), 1)
    owner = tl.zeros((BLOCKS,), dtype=tl.int32)
    blocks = num_pairs * 0
    for begin in range(0, num_experts, CHUNK):
        expert = begin + some
        of_expert = own[:, None] == expert[None, :]
        needed = (tl.sum(of_expert.to(tl.int32), 0) + (ROWS - 1)) // ROWS
        end = blocks + tl.cumsum(needed, 0)
        place += tl.sum(tl.where(of_expert, ((end - needed) * ROWS)[None, :], 0), 1)
        owner += tl.sum(((end[None, :] <= block[:, None]) & (expert < num_experts)[None, :]).to(tl.int32), 1)
        blocks += tl.sum(needed, 0)
    for begin in range(0, bound * ROWS, PAIRS):
        tl.store(pairs + begin + pair, num_pairs, mask=begin + pair < bound * ROWS)
    tl.debug_barrier()  # other threads fill what a thread then overwrites
    tl.store(pairs + place, pair, mask=pair < num_pairs)
    tl.store(owners + block, owner, mask=block < bound)
