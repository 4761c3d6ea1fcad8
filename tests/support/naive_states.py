"""Recurrent layers by the definition of their rules: in float64, token by token and head by head."""

from functools import singledispatch

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs, SsdShape, StateShape


def naive_outputs(shape: StateShape, x: RecurrentInputs) -> Tensor:
    """Returns the outputs of all tokens of one sequence, float64 [T, heads, output_dim]."""
    mixed = naive_conv(x.mixed, x.conv, x.conv_bias)
    return _read(shape, mixed, x)


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns SiLU of the causal convolution of x [T, C] by weight [C, taps], with zeros before x; float64."""
    x, taps = x.double(), weight.double().t()
    padded = torch.cat((x.new_zeros(taps.shape[0] - 1, x.shape[1]), x))
    mixed = torch.stack([(padded[at : at + taps.shape[0]] * taps).sum(0) for at in range(x.shape[0])])
    mixed = mixed if bias is None else mixed + bias.double()
    return mixed * mixed.sigmoid()


def naive_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes chunk_delta_rule token by token."""
    state, outputs = state.double().clone(), []
    for token in range(q.shape[0]):
        for head in range(q.shape[1]):
            own, key = state[head], k[token, head].double()
            own *= log_decay[token, head].double().exp().reshape(-1, 1)
            own += torch.outer(key, (v[token, head].double() - own.t() @ key) * float(beta[token, head]))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[token].double()))
    return torch.stack(outputs), state


def naive_ssd(
    x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, delta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes chunk_ssd token by token."""
    state, outputs, served = state.double().clone(), [], x.shape[1] // b.shape[1]
    for token in range(x.shape[0]):
        read = []
        for head in range(x.shape[1]):
            own, group = state[head], head // served
            own *= float(log_decay[token, head].double().exp())
            own += torch.outer(x[token, head].double() * float(delta[token, head]), b[token, group].double())
            read.append(own @ c[token, group].double())
        outputs.append(torch.stack(read))
    return torch.stack(outputs), state


@singledispatch
def _read(shape: StateShape, mixed: Tensor, x: RecurrentInputs) -> Tensor:
    """mixed: after the convolution."""
    raise NotImplementedError(f"no rule of {shape}")


@_read.register
def _(shape: DeltaShape, mixed: Tensor, x: RecurrentInputs) -> Tensor:
    keys = shape.key_heads * shape.key_dim
    q, k, v = mixed.split((keys, keys, shape.value_heads * shape.value_dim), 1)
    q, k = (one.unflatten(1, (shape.key_heads, -1)) for one in (q, k))
    q, k = (one / (one.square().sum(2, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(shape.value_heads // shape.key_heads, 1) for one in (q, k))
    v = v.unflatten(1, (shape.value_heads, -1))
    return naive_delta_rule(q * shape.key_dim**-0.5, k, v, x.log_decay, x.strength, torch.zeros(shape.state))[0]


@_read.register
def _(shape: SsdShape, mixed: Tensor, x: RecurrentInputs) -> Tensor:
    shared = shape.groups * shape.state_size
    heads, b, c = mixed.split((shape.num_heads * shape.head_dim, shared, shared), 1)
    heads = heads.unflatten(1, (shape.num_heads, -1))
    b, c = (one.unflatten(1, (shape.groups, -1)) for one in (b, c))
    o, _ = naive_ssd(heads, b, c, x.log_decay, x.strength, torch.zeros(shape.state))
    return o if x.skip is None else o + heads * x.skip.double()[:, None]
