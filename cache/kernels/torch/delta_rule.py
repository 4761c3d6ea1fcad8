"""The gated delta rule, with torch operations on any device.

A state S [key_dim, value_dim] of a head becomes, with each token,

    S ← e^g S,   S ← S + k β (v - kᵀ S)ᵀ,   o = qᵀ S

in float32. `step_*` takes one token of each of several sequences, `chunk_*` all new tokens of one sequence. Both give
the same, but for rounding. There q and k are unit vectors: see unit().
"""

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs

CHUNK = 64
UNIT_EPS = 1e-6  # as in transformers


def step(shape: DeltaShape, x: RecurrentInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """See Rule."""
    return step_delta_rule(*heads_of(shape, x.mixed), x.log_decay, x.strength, states)


def advance(shape: DeltaShape, x: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See Rule."""
    return chunk_delta_rule(*heads_of(shape, x.mixed), x.log_decay, x.strength, state)


def heads_of(shape: DeltaShape, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [n, value_heads, key_dim] and v [n, value_heads, value_dim], float32."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.split_with_sizes((keys, keys, shape.value_heads * shape.value_dim), 1)
    served = shape.value_heads // shape.key_heads
    q, k = (unit(x.unflatten(1, (shape.key_heads, -1))).repeat_interleave(served, 1) for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.float().unflatten(1, (shape.value_heads, -1))


def unit(x: Tensor) -> Tensor:
    """float32: each last dimension divided by its length."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """o [B, H, value_dim] of the next token of each of B sequences, and their states after it; float32 all.

    q, k: [B, H, key_dim]; v: [B, H, value_dim]; beta: [B, H]; log_decay: [B, H], or [B, H, key_dim] where each row of a
    state has its own; states: [B, H, key_dim, value_dim].
    """
    states = states * log_decay.exp().view(*states.shape[:2], -1, 1)
    known = (k.unsqueeze(2) @ states).squeeze(2)
    delta = (v - known) * beta.unsqueeze(2)
    states = states + k.unsqueeze(3) * delta.unsqueeze(2)
    return (q.unsqueeze(2) @ states).squeeze(2), states


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Computes step_delta_rule for the next T tokens of one sequence: q, k [T, H, key_dim], v [T, H, value_dim],
    log_decay and beta [T, H], state [H, key_dim, value_dim].

    Takes `chunk` tokens at a time. The tokens' additions to the state are the solution u of a triangular system (the UT
    transform of Yang et al., arXiv 2406.06484).
    """
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(x.split(chunk) for x in (q, k, v, log_decay, beta)), strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in (q_c, k_c, v_c))  # [H, n, dim]
        total = g_c.t().cumsum(1)  # of all decays up to each token
        decay = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()  # [H, n, n]
        weighted = keys * beta_c.t().unsqueeze(2)
        system = (weighted @ keys.transpose(1, 2)) * decay
        since_start = total.exp().unsqueeze(2)
        targets = values * beta_c.t().unsqueeze(2) - (weighted * since_start) @ state
        updates = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        within = (queries @ keys.transpose(1, 2)) * decay
        outputs.append(((queries * since_start) @ state + within @ updates).transpose(0, 1))
        until_end = (total[:, -1:] - total).exp().unsqueeze(2)
        state = state * total[:, -1].exp()[:, None, None] + (keys * until_end).transpose(1, 2) @ updates
    return torch.cat(outputs), state
