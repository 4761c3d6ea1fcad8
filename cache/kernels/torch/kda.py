"""The chunk form of Kimi Delta Attention (arXiv 2510.26692), with torch operations on any device: a gated delta rule
with a decay for each row of a state. Its form for single tokens is step_delta_rule.
"""

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import KdaShape, RecurrentInputs
from tandem.cache.kernels.torch.delta_rule import heads_of

CHUNK = 16  # decays between all pairs of tokens are computed for each row


def advance(shape: KdaShape, x: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """See Rule."""
    return chunk_kda(*heads_of(shape, x.mixed), x.log_decay, x.strength, state)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Computes chunk_delta_rule with a decay for each row of a state: log_decay is [T, H, key_dim]."""
    outputs = []
    for q_c, k_c, v_c, g_c, beta_c in zip(*(x.split(chunk) for x in (q, k, v, log_decay, beta)), strict=True):
        queries, keys, values = (x.transpose(0, 1) for x in (q_c, k_c, v_c))  # [H, n, dim]
        total = g_c.transpose(0, 1).cumsum(1)  # of all decays up to each token
        later = torch.ones(total.shape[1], total.shape[1], device=q.device).triu(1).bool()[..., None]
        decay = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill_(later, -torch.inf).exp_()  # [H, n, n, key_dim]
        decayed = decay.mul_(keys.unsqueeze(1))
        system = torch.einsum("hid,hijd->hij", keys * beta_c.t().unsqueeze(2), decayed)
        since_start = total.exp()
        targets = (values - (keys * since_start) @ state) * beta_c.t().unsqueeze(2)
        updates = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        within = torch.einsum("hid,hijd->hij", queries, decayed)
        outputs.append(((queries * since_start) @ state + within @ updates).transpose(0, 1))
        until_end = (total[:, -1:] - total).exp()
        state = state * total[:, -1].exp().unsqueeze(2) + (keys * until_end).transpose(1, 2) @ updates
    return torch.cat(outputs), state
