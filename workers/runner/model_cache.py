"""The paged cache of a model: what its layers keep, and how they attend to that."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.given import GivenKV
from tandem.cache.kinds.heads import Heads
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.kinds.shared import Shared
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import Kind, LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Every, Span, Window
from tandem.workers.models.compressed.fields import HEAVY, SLIDING, SPARSE, CompressedConfig
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.latent import LatentConfig


def kv_layout(
    model: ModelConfig, page_size: int, scales: KVScales | None = None, drafter: ModelConfig | None = None
) -> KVLayout:
    """A group for each span that layers keep, in the order of their first layers; one for latents, and one for index
    keys next to them; recurrent states come last. Readers are in none. What layer i keeps of an encoder is layer
    num_layers + i, in a last group. Layers that are a feed-forward alone are in none, too.

    drafter: its layers stand after the model's, in groups of their own, but with latents that are alike in one.
    scales: see KVLayout. InvalidArgument where pages do not divide a model's chunks.
    """
    groups, readers = _layer_groups(model, page_size), list(model.readers.items())
    if drafter is not None:
        first, behind = model.num_layers, _layer_groups(drafter, page_size)
        behind = [replace(group, layers=tuple(first + layer for layer in group.layers)) for group in behind]
        if _has_like_latents(model, drafter):
            groups = [replace(groups[0], layers=groups[0].layers + behind[0].layers)]
        else:
            groups += behind
        readers += [(first + layer, first + of) for layer, of in drafter.readers.items()]
    keepless = tuple(sorted(model.single_blocks or ()))
    return KVLayout(tuple(groups), page_size, model.dtype, scales, model.shard, tuple(readers), keepless)


def _has_like_latents(model: ModelConfig, other: ModelConfig) -> bool:
    """Whether layers of both keep like latents, and attend to all of them in the same way."""
    if model.latent is None or other.latent is None:
        return False
    if model.latent.index is not None or other.latent.index is not None:
        return False
    kinds = [(one.latent.rank, one.latent.rotated, one.latent.heads) for one in (model, other) if one.latent]
    return kinds[0] == kinds[1] and (model.rope, model.attn_scale) == (other.rope, other.attn_scale)


def _layer_groups(model: ModelConfig, page_size: int) -> list[LayerGroup]:
    if model.latent is not None:
        attending = tuple(layer for layer, keeps in enumerate(model.layer_spans) if not keeps.last)
        return _latent_groups(model.latent, attending) + _state_groups(model)
    if model.compressed is not None:
        return _shared_groups(model.compressed, model.head_dim)
    if model.chunked is not None and model.chunked.size % page_size:
        raise InvalidArgument(
            f"page_size is {page_size}; {model.architecture} attends in chunks of {model.chunked.size} positions "
            "(attention_chunk_size): it must be a divisor of that"
        )
    layers_of: dict[Span, list[int]] = {}
    for layer, keeps in enumerate(model.layer_spans):
        if layer not in model.readers and not keeps.last and model.has_mixer(layer):
            layers_of.setdefault(keeps, []).append(layer)
    groups: list[LayerGroup] = []
    for keeps, layers in layers_of.items():
        heads = model.heads_of(layers[0])
        kind = KV(heads.num_kv_heads, model.stored_head_dim(heads.head_dim), keeps, replicas=heads.replicas)
        groups.append(LayerGroup(tuple(layers), kind))
    groups += _state_groups(model)
    if model.encoder is not None:
        given = GivenKV(model.num_kv_heads, model.stored_head_dim(model.head_dim), replicas=model.kv_replicas)
        groups.append(LayerGroup(tuple(range(model.num_layers, 2 * model.num_layers)), given))
    return groups


def _state_groups(model: ModelConfig) -> list[LayerGroup]:
    if model.recurrent is None:
        return []
    kind = Recurrent(model.recurrent.shape, model.recurrent.sharers)
    return [LayerGroup(tuple(sorted(model.recurrent.layers)), kind)]


def _latent_groups(model: LatentConfig, layers: tuple[int, ...]) -> list[LayerGroup]:
    index, latents = model.index, Latent(model.rank + model.rotated, model.rank)
    groups = [LayerGroup(layers, latents)]
    if index is not None:
        keys = IndexKeys(index.head_dim, index.head_dim - model.rotated, index.top_k)
        groups.append(LayerGroup(index.layers, keys))
    return groups


def _shared_groups(model: CompressedConfig, head_dim: int) -> list[LayerGroup]:
    """A group for windows of each kind of RoPE, then, of each kind of compressed KV: inputs, entries and index keys."""
    window = Shared(head_dim, Window(model.window))
    found: list[tuple[tuple[int, ...], Kind]] = [
        (model.layers_of(SLIDING), window),
        (model.layers_of(SPARSE, HEAVY), window),
    ]
    for kind, every in model.rates:
        layers = model.layers_of(kind)
        if not layers:
            continue
        chooses = model.chooses(layers[0])
        keeps, width = Window((1 + chooses) * every), model.input_width(layers[0], head_dim)
        found.append((layers, Beside(1, width, keeps, dtype=torch.float32)))
        found.append((layers, Beside(1, head_dim, Every(every), planes=1)))
        if chooses:
            found.append((layers, Beside(1, model.index.head_dim, Every(every), planes=1, top_k=model.index.top_k)))
    return [LayerGroup(layers, kind) for layers, kind in found if layers]


def make_cache(
    model: ModelConfig,
    layout: KVLayout,
    pools: Sequence[Tensor],
    *,
    max_sequences: int,
    max_length: int,
    writer: PageWriter | None = None,
    kernels: KernelFactory = choose_kernels,
    drafter: ModelConfig | None = None,
    snapshots: SnapshotRule = NO_SNAPSHOTS,
) -> PagedKVCache:
    """layout: what kv_layout() gives of model and drafter. For the rest see PagedKVCache; max_length: of one
    sequence."""
    owners = [model if drafter is None or group.layers[0] < model.num_layers else drafter for group in layout.groups]
    return PagedKVCache(
        layout,
        pools,
        max_sequences=max_sequences,
        max_sequence_length=max_length,
        rope=[_rope(owner, group) for group, owner in zip(layout.groups, owners, strict=True)],
        writer=writer,
        heads=[_heads(owner, group) for group, owner in zip(layout.groups, owners, strict=True)],
        kernels=kernels,
        snapshots=snapshots,
    )


def _rope(owner: ModelConfig, group: LayerGroup) -> RopeParameters:
    if group.keeps.given or group.keeps.last:
        return RopeParameters("none", 0)
    if owner.compressed is not None:
        has_window_alone = owner.compressed.every(group.layers[0]) is None
        return owner.local_rope if has_window_alone and owner.local_rope is not None else owner.rope
    return owner.local_rope or owner.rope if group.keeps.drops_past else owner.rope


def _heads(model: ModelConfig, group: LayerGroup) -> Heads:
    scale = model.head_dim**-0.5 if model.attn_scale is None else model.attn_scale
    latent = None if model.latent is None or group.keeps.last else model.latent.heads
    return Heads(scale, model.attn_softcap, latent)
