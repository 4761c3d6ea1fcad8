"""The paged cache of a model: what its layers keep, and how they attend to that."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tandem.cache.attention.layer_groups import Heads
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Every, Given, Span, Window
from tandem.workers.models.compressed.fields import HEAVY, SLIDING, SPARSE, CompressedConfig
from tandem.workers.models.config import ModelConfig


def kv_layout(
    model: ModelConfig, page_size: int, scales: KVScales | None = None, drafter: ModelConfig | None = None
) -> KVLayout:
    """A group for each span that layers keep, in the order of their first layers; one for latents, and one for index
    keys beside them. Readers are in none. What layer i keeps of an encoder is layer num_layers + i, in a last group.

    drafter: its layers stand behind the model's, in groups of their own, but with latents that are alike in one.
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
    return KVLayout(tuple(groups), page_size, model.dtype, scales, model.shard, tuple(readers))


def _has_like_latents(model: ModelConfig, other: ModelConfig) -> bool:
    """Whether layers of both keep latents that are alike, and attend alike to all of them."""
    if model.latent is None or other.latent is None:
        return False
    if model.latent.index is not None or other.latent.index is not None:
        return False
    kinds = [(one.latent.rank, one.latent.rotated, one.latent.heads) for one in (model, other) if one.latent]
    return kinds[0] == kinds[1] and (model.rope, model.attn_scale) == (other.rope, other.attn_scale)


def _layer_groups(model: ModelConfig, page_size: int) -> list[LayerGroup]:
    if model.latent is not None:
        rank, width = model.latent.rank, model.latent.rank + model.latent.rotated
        groups, index = [LayerGroup(tuple(range(model.num_layers)), 1, width, latent_rank=rank)], model.latent.index
        if index is not None:
            still = index.head_dim - model.latent.rotated
            groups.append(LayerGroup(index.layers, 1, index.head_dim, latent_rank=still, top_k=index.top_k))
        return groups
    layers_of: dict[Span, list[int]] = {}
    if model.chunked is not None and model.chunked.size % page_size:
        raise InvalidArgument(
            f"page_size is {page_size}; {model.architecture} attends in chunks of {model.chunked.size} positions "
            "(attention_chunk_size), and a divisor of that is accepted"
        )
    for layer, keeps in enumerate(model.layer_spans):
        if layer not in model.readers:
            layers_of.setdefault(keeps, []).append(layer)
    groups: list[LayerGroup] = []
    if model.compressed is not None:
        return _shared_groups(model.compressed, model.head_dim)
    for keeps, layers in layers_of.items():
        heads = model.heads_of(layers[0])
        groups.append(LayerGroup(tuple(layers), heads.num_kv_heads, model.stored_head_dim(heads.head_dim), keeps))
    if model.encoder is not None:
        layers, width = range(model.num_layers, 2 * model.num_layers), model.stored_head_dim(model.head_dim)
        groups.append(LayerGroup(tuple(layers), model.num_kv_heads, width, Given()))
    return groups


def _shared_groups(model: CompressedConfig, head_dim: int) -> list[LayerGroup]:
    """A group for windows of each kind of RoPE, then, of each kind of compressed KV: inputs, entries and index keys."""
    groups, window = [], Window(model.window)
    for layers in (model.layers_of(SLIDING), model.layers_of(SPARSE, HEAVY)):
        if layers:
            groups.append(LayerGroup(layers, 1, head_dim, window, num_planes=1))
    for kind, every in model.rates:
        layers = model.layers_of(kind)
        if not layers:
            continue
        overlap, entries = 1 + model.chooses(layers[0]), LayerGroup(layers, 1, head_dim, Every(every))
        width, entries = model.input_width(layers[0], head_dim), replace(entries, beside=True, num_planes=1)
        inputs = LayerGroup(layers, 1, width, Window(overlap * every), beside=True, dtype=torch.float32)
        groups += [inputs, entries]
        if model.chooses(layers[0]):
            groups.append(replace(entries, head_dim=model.index.head_dim, top_k=model.index.top_k))
    return groups


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
        heads=[_heads(owner) for owner in owners],
        kernels=kernels,
    )


def _rope(owner: ModelConfig, group: LayerGroup) -> RopeParameters:
    if group.keeps.given:
        return RopeParameters("none", 0)
    if owner.compressed is not None:
        has_window_alone = owner.compressed.every(group.layers[0]) is None
        return owner.local_rope if has_window_alone and owner.local_rope is not None else owner.rope
    return owner.local_rope or owner.rope if group.keeps.drops_past else owner.rope


def _heads(model: ModelConfig) -> Heads:
    scale = model.head_dim**-0.5 if model.attn_scale is None else model.attn_scale
    return Heads(scale, model.attn_softcap, None if model.latent is None else model.latent.heads)
