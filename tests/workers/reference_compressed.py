"""The plainest attention to a window and to compressed entries: loops over tokens, entries and all that was fed."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.workers.models.compressed.fields import CompressedConfig


@dataclass
class Fed:
    """All that one sequence has fed to a layer, in order."""

    kv: list[Tensor] = field(default_factory=list)  # rotated, [D]
    values: list[Tensor] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)


def attend(
    config: CompressedConfig,
    layer: int,
    rotary: RotaryEmbedding,
    fed: Fed,
    q: Tensor,
    kv: Tensor,
    sinks: Tensor,
    compression: Compression | None,
) -> Tensor:
    """o [n, heads, D] of the next n tokens of a sequence; for the arguments see TvmCache.shared_attention."""
    outputs = []
    for token in range(q.shape[0]):
        position = len(fed.kv)
        fed.kv.append(turn(kv[token, 0], rotary, position))
        seen = fed.kv[max(position - config.window + 1, 0) :]
        if compression is not None:
            fed.values.append(compression.values[token])
            fed.gates.append(compression.gates[token])
            seen = seen + chosen_entries(config, layer, rotary, fed, compression, token)
        keys = torch.stack(seen).float()
        scores = turn(q[token], rotary, position).float() @ keys.T * q.shape[2] ** -0.5
        weights = torch.cat((scores, sinks.float()[:, None]), 1).softmax(1)[:, :-1]
        outputs.append(turn((weights @ keys).to(q.dtype), rotary, -position))
    return torch.stack(outputs)


def chosen_entries(
    config: CompressedConfig, layer: int, rotary: RotaryEmbedding, fed: Fed, x: Compression, token: int
) -> list[Tensor]:
    """Returns the entries that the last token of `fed`, which is token `token` of x, sees."""
    size, dtype = x.norms[0].shape[0], fed.kv[0].dtype
    entries = [one.to(dtype) for one in entries_of(config, layer, rotary, fed, x, 0, size, x.norms[0])]
    if x.query is None or len(entries) <= config.index.top_k:
        return entries
    begin, key_size = 2 * size, x.norms[1].shape[0]
    keys = torch.stack(entries_of(config, layer, rotary, fed, x, begin, key_size, x.norms[1])).to(dtype).float()
    q = turn(x.query.q[token], rotary, len(fed.kv) - 1).float()
    best = (x.query.weights[token] @ (q @ keys.T).relu()).topk(config.index.top_k).indices
    return [entries[index] for index in sorted(best.tolist())]


def entries_of(
    config: CompressedConfig,
    layer: int,
    rotary: RotaryEmbedding,
    fed: Fed,
    x: Compression,
    begin: int,
    size: int,
    norm: Tensor,
) -> list[Tensor]:
    """All that are complete, made of the numbers from `begin` on, float32 [size] each."""
    every, made = config.every(layer), []
    assert every is not None
    for first in range(0, len(fed.values) - every + 1, every):
        values, gates = [], []
        for position in range(max(first - every, 0) if config.chooses(layer) else first, first + every):
            own = begin + size if config.chooses(layer) and position >= first else begin
            values.append(fed.values[position][own : own + size])
            gates.append((fed.gates[position] + x.bias[position % every])[own : own + size])
        pooled = (torch.stack(values) * torch.stack(gates).softmax(0)).sum(0)
        made.append(turn(pooled / (pooled.square().mean() + x.eps).sqrt() * norm, rotary, first))
    return made


def turn(x: Tensor, rotary: RotaryEmbedding, position: int) -> Tensor:
    """x [..., D], whose last numbers are complex ones, rotated; by a position below 0 the other way."""
    cos, sin = (table[0] for table in rotary.cos_sin(torch.tensor([abs(position)])))
    half = cos.shape[0] // 2
    factor = torch.complex(cos[:half].float(), sin[:half].float() * (1 if position >= 0 else -1))
    numbers = torch.view_as_complex(x[..., -2 * half :].float().unflatten(-1, (half, 2)).contiguous())
    turned = torch.view_as_real(numbers * factor).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), -1)
