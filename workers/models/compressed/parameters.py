"""The tensors of attention to a window and to compressed KV, and of hyper-connections."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.kernels.base import HyperParameters
from tandem.workers.models.compressed.fields import CompressedConfig, HyperConfig
from tandem.workers.weights.allocator import Allocator
from tandem.workers.weights.weight import Weight, WeightStack


@dataclass(frozen=True, slots=True)
class QueryParameters:
    """Hi index heads of Di."""

    q_up: Weight  # [Hi·Di, Q]
    weights: Weight  # [Hi, H]


@dataclass(frozen=True, slots=True)
class CompressorParameters:
    """Weights that make W numbers a position: numbers of entries, then, where queries choose, of index keys."""

    values: Weight  # [W, H]
    gates: Weight  # [W, H]
    biases: tuple[Tensor, ...]  # float32 [every, W of one], of entries, and of index keys
    norms: tuple[Tensor, ...]  # [D], and [Di]
    query: QueryParameters | None


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """Hq heads of D that attend to one head whose K and V are the same. G groups of heads."""

    q_down: Weight  # [Q, H]
    q_norm: Tensor  # [Q]
    q_up: Weight  # [Hq·D, Q]
    kv: Weight  # [D, H]
    kv_norm: Tensor  # [D]
    sinks: Tensor  # float32 [Hq]
    out: WeightStack  # [G, R, Hq·D / G]: each group's first map
    o: Weight  # [H, G·R]
    compressor: CompressorParameters | None  # None: the layer has a window alone


def allocate_shared(
    config: CompressedConfig,
    layer: int,
    hidden: int,
    num_heads: int,
    head_dim: int,
    new: Allocator,
    new_norm: Allocator,
    exact: Allocator,
) -> SharedParameters:
    """exact: makes tensors of float32."""
    rows = num_heads * head_dim // config.out_groups
    return SharedParameters(
        q_down=new.linear(config.q_rank, hidden),
        q_norm=new_norm(config.q_rank),
        q_up=new.linear(num_heads * head_dim, config.q_rank),
        kv=new.linear(head_dim, hidden),
        kv_norm=new_norm(head_dim),
        sinks=exact(num_heads),
        out=new.stack(config.out_groups, config.out_rank, rows),
        o=new.linear(hidden, config.out_groups * config.out_rank),
        compressor=_allocate_compressor(config, layer, hidden, head_dim, new, new_norm, exact),
    )


def _allocate_compressor(
    config: CompressedConfig,
    layer: int,
    hidden: int,
    head_dim: int,
    new: Allocator,
    new_norm: Allocator,
    exact: Allocator,
) -> CompressorParameters | None:
    every, width, index = config.every(layer), config.input_width(layer, head_dim), config.index
    if every is None:
        return None
    chooses = config.chooses(layer)
    sizes = (head_dim, index.head_dim) if chooses else (head_dim,)
    query = None
    if chooses:
        query = QueryParameters(
            new.linear(index.num_heads * index.head_dim, config.q_rank), new.dense(index.num_heads, hidden)
        )
    return CompressorParameters(
        values=new.linear(width, hidden),
        gates=new.linear(width, hidden),
        biases=tuple(exact(every, (1 + chooses) * size) for size in sizes),
        norms=tuple(new_norm(size) for size in sizes),
        query=query,
    )


def allocate_hyper(config: HyperConfig, hidden: int, device: torch.device) -> tuple[HyperParameters, HyperParameters]:
    """Allocates the parameters of a layer's attention, and of its feed-forward."""
    first, second = (_allocate(config.num_weights, 3, config, hidden, device) for _ in range(2))
    return first, second


def allocate_head(config: HyperConfig, hidden: int, device: torch.device) -> HyperParameters:
    return _allocate(config.streams, 1, config, hidden, device)


def _allocate(count: int, scales: int, config: HyperConfig, hidden: int, device: torch.device) -> HyperParameters:
    shapes = ((count, config.streams * hidden), (count,), (scales,))
    return HyperParameters(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))
