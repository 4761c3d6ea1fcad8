"""State-space duality, the rule of Mamba-2 (Dao and Gu, arXiv 2405.21060), with torch operations on any device.

A state S [head_dim, state_size] of a head becomes, with each token,

    S ← e^g S + Δ x Bᵀ,   y = S C + D x

in float32, where g = Δ A is the log_decay. Heads of a group share B and C. `step_ssd` takes one token of each of
several sequences, `chunk_ssd` all new tokens of one sequence. Both give the same, but for rounding.
"""

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs, SsdShape

CHUNK = 64


def step(shape: SsdShape, x: RecurrentInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """See Rule."""
    heads = _heads(shape, x.mixed)
    output, states = step_ssd(*heads, x.log_decay, x.strength, states)
    return _skip(output, heads[0], x.skip), states


def advance(shape: SsdShape, x: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See Rule."""
    heads = _heads(shape, x.mixed)
    output, state = chunk_ssd(*heads, x.log_decay, x.strength, state)
    return _skip(output, heads[0], x.skip), state


def step_ssd(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, delta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """S C [n, H, head_dim] of the next token of each of n sequences, and their states after it; float32 all.

    x: [n, H, head_dim]; b, c: [n, G, state_size]; log_decay, delta: [n, H]; states: [n, H, head_dim, state_size].
    """
    served = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(served, 1) for one in (b, c))
    written = (x * delta.unsqueeze(2)).unsqueeze(3) * b.unsqueeze(2)
    states = states * log_decay.exp()[..., None, None] + written
    return (states @ c.unsqueeze(3)).squeeze(3), states


def chunk_ssd(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, delta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Computes step_ssd for the next T tokens of one sequence: x [T, H, head_dim], b, c [T, G, state_size], log_decay
    and delta [T, H], state [H, head_dim, state_size].

    Takes `chunk` tokens at a time. Within a chunk y is masked attention of C to B with decays for a mask. The effect of
    earlier chunks is read from the state.
    """
    outputs, served = [], x.shape[1] // b.shape[1]
    for x_c, b_c, c_c, g_c, delta_c in zip(*(one.split(chunk) for one in (x, b, c, log_decay, delta)), strict=True):
        keys, queries = (one.transpose(0, 1) for one in (b_c, c_c))  # [G, n, state_size]
        values = (x_c * delta_c.unsqueeze(2)).transpose(0, 1)  # [H, n, head_dim]
        scores = (queries @ keys.transpose(1, 2)).repeat_interleave(served, 0)  # [H, n, n]
        keys, queries = (one.repeat_interleave(served, 0) for one in (keys, queries))
        total = g_c.t().cumsum(1)  # of all decays up to each token
        decay = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        before = (queries * total.exp().unsqueeze(2)) @ state.transpose(1, 2)
        outputs.append((before + (scores * decay) @ values).transpose(0, 1))
        until_end = (total[:, -1:] - total).exp().unsqueeze(2)
        state = state * total[:, -1].exp()[:, None, None] + (values * until_end).transpose(1, 2) @ keys
    return torch.cat(outputs), state


def _heads(shape: SsdShape, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, heads, head_dim], B and C [n, groups, state_size], float32."""
    shared = shape.groups * shape.state_size
    x, b, c = mixed.float().split_with_sizes((shape.num_heads * shape.head_dim, shared, shared), 1)
    b, c = (one.unflatten(1, (shape.groups, -1)) for one in (b, c))
    return x.unflatten(1, (shape.num_heads, -1)), b, c


def _skip(output: Tensor, x: Tensor, skip: Tensor | None) -> Tensor:
    return output if skip is None else output + x * skip.unsqueeze(1)
