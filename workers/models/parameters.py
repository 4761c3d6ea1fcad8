"""The tensors of a decoder, fused for few large products."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.workers.kernels.base import HyperParameters, Linear
from tandem.workers.models.compressed.parameters import (
    SharedParameters,
    allocate_head,
    allocate_hyper,
    allocate_shared,
)
from tandem.workers.models.config import ModelConfig, PerLayerConfig
from tandem.workers.models.indexer.fields import IndexConfig
from tandem.workers.models.latent import LatentConfig
from tandem.workers.models.moe import MoeConfig
from tandem.workers.models.recurrent.parameters import RecurrentParameters, allocate_recurrent
from tandem.workers.weights.adapted import AdaptedWeights
from tandem.workers.weights.allocator import ALL_DENSE, Allocator, Forms
from tandem.workers.weights.weight import Weight, WeightStack


@dataclass(frozen=True, slots=True)
class GatedParameters:
    """A dense feed-forward."""

    gate_up: Weight  # [2·I, H]: gate, then up; [I, H] without a gate
    down: Weight  # [H, I]


@dataclass(frozen=True, slots=True)
class MoeParameters:
    """E experts. The shard holds L. Their weights are transposed views when the checkpoint's layout is."""

    router: Weight  # [E, H]
    correction: Tensor | None  # float32 [E], see Routing
    shared: GatedParameters | None  # a feed-forward that every token takes besides
    gate_up: WeightStack  # [L, 2·I, H], or [L, I, H] without a gate
    down: WeightStack  # [L, H, I]
    table: Tensor | None = None  # int64 [vocab, top_k]: the experts of each token id, where they are not chosen
    factors: Tensor | None = None  # [E], by which the weights of the chosen experts are multiplied
    shared_gate: Weight | None = None  # [1, H], see ExpertNames
    into_latent: Weight | None = None  # [W, H], where experts have W in place of H numbers
    from_latent: Weight | None = None  # [H, W]


@dataclass(frozen=True, slots=True)
class BesideParameters:
    """Experts next to the dense feed-forward of a layer. The router and the experts take the residual stream, each by
    a norm of its own. Both outputs have a norm after them. [H] each."""

    moe: MoeParameters
    router_scale: Tensor  # the weight of the router's norm, times √H
    before: Tensor
    behind: Tensor
    behind_dense: Tensor


@dataclass(frozen=True, slots=True)
class PerLayerParameters:
    """The parameters by which a layer uses its own input of P numbers."""

    gate: Weight  # [P, H]
    projection: Weight  # [H, P]
    norm: Tensor  # [H]


@dataclass(frozen=True, slots=True)
class PerLayerTables:
    """The inputs of all L layers, of P numbers each."""

    embedding: Weight  # [vocab, L·P]
    projection: Weight  # [L·P, H]
    norm: Tensor  # [P]


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """The parameters of Hq heads of q and Hkv heads of k and v, of D numbers."""

    qkv: Weight  # [(Hq + 2·Hkv)·D, H]: the rows of q, then k, then v; a reader has those of q, v may be k
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    sinks: Tensor | None  # [Hq]
    o: Weight  # [H, Hq·D]


@dataclass(frozen=True, slots=True)
class IndexParameters:
    """Hi index heads of D numbers; Q is the width of q_up's input."""

    q_up: Weight  # [Hi·D, Q]
    key: Weight  # [D, H]
    key_norm: Linear  # [D]: weight and bias of a LayerNorm
    weights: Weight  # float32 [Hi, H]


@dataclass(frozen=True, slots=True)
class LatentParameters:
    """The parameters of Hq heads that read latents."""

    down: Weight  # [Q + rank + rotated, H]: q's first map, or q; the latent; the key that heads share
    q_norm: Tensor | None  # [Q]; None where q has one map
    q_up: Weight | None  # [Hq · (key_dim + rotated), Q]; None where q has one map
    latent_norm: Tensor  # [rank]
    up: Weight  # [Hq · (key_dim + value_dim), rank]: see UpProjections
    o: Weight  # [H, Hq · value_dim]
    index: IndexParameters | None = None  # None: the layer has no indexer


AnyAttention = AttentionParameters | LatentParameters | SharedParameters | RecurrentParameters


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The weights of a layer's norms, [H] each. A layer of one block has one before it, whichever block that is."""

    before_attention: Tensor
    behind_attention: Tensor | None
    before_feed_forward: Tensor
    behind_feed_forward: Tensor | None


@dataclass(frozen=True, slots=True)
class CrossParameters:
    """Attention to an encoder's output of He numbers; the norms before and after are [H]."""

    q: Weight  # [Hq·D, H]
    kv: Weight  # [2·Hkv·D, He]: the rows of k, then v
    o: Weight  # [H, Hq·D]
    before: Tensor
    behind: Tensor


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. I intermediate, H hidden. A tensor or block is None where the layer has none."""

    norms: LayerNorms
    attention: AnyAttention | None
    feed_forward: GatedParameters | MoeParameters | None
    beside: BesideParameters | None = None
    per_layer: PerLayerParameters | None = None
    scalar: Tensor | None = None  # [1], by which the output is multiplied
    hyper: tuple[HyperParameters, HyperParameters] | None = None  # of attention and feed-forward
    cross: CrossParameters | None = None


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """embedding and lm_head [vocab, H] are the same weight when the embeddings are tied.

    layers is a list so that a decoder can take layer after layer and drop what it has repacked.
    """

    embedding: Weight
    layers: list[LayerParameters]
    final_norm: Tensor
    lm_head: Weight
    per_layer: PerLayerTables | None = None
    hyper_head: HyperParameters | None = None
    encoder: "DecoderParameters | None" = None  # whose lm_head is its embedding
    adapted: AdaptedWeights | None = None  # None: no adapter changes a product


def allocate_parameters(config: ModelConfig, device: torch.device, forms: Forms = ALL_DENSE) -> DecoderParameters:
    """Uninitialised tensors on `device`, of config.dtype where they are dense."""
    new, new_norm = allocators(config, device, forms)
    embedding = new.dense(config.vocab_size, config.hidden_size)
    return DecoderParameters(
        embedding=embedding,
        layers=[allocate_layer(config, index, new, new_norm) for index in range(config.num_layers)],
        final_norm=new_norm(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else new.dense(len(config.head_part), config.hidden_size),
        per_layer=None if config.per_layer is None else _allocate_tables(config, config.per_layer, new, new_norm),
        hyper_head=None if config.hyper is None else allocate_head(config.hyper, config.hidden_size, device),
        encoder=None if config.encoder is None else allocate_parameters(config.encoder, device, forms),
    )


def allocators(config: ModelConfig, device: torch.device, forms: Forms) -> tuple[Allocator, Allocator]:
    """Returns the allocators of weights, and of norms' weights."""
    new = Allocator(config.dtype, device, forms)
    return new, Allocator(torch.float32, device) if config.float32_norms else new


def allocate_layer(config: ModelConfig, index: int, new: Allocator, new_norm: Allocator) -> LayerParameters:
    """Allocates the parameters of layer `index`. new_norm: makes the weights of norms."""
    hidden, moe, first = config.hidden_size, config.moe, new_norm(config.hidden_size)
    return LayerParameters(
        LayerNorms(
            before_attention=first,
            behind_attention=new_norm.when(config.out_norms, hidden),
            before_feed_forward=new_norm(hidden) if config.single_blocks is None else first,
            behind_feed_forward=new_norm.when(config.out_norms, hidden),
        ),
        _allocate_any_attention(config, index, new, new_norm) if config.has_mixer(index) else None,
        _allocate_feed_forward(config, index, new) if config.has_feed_forward(index) else None,
        beside=_allocate_beside(config, moe, new, new_norm) if moe is not None and moe.beside else None,
        per_layer=None if config.per_layer is None else _allocate_per_layer(config, config.per_layer, new, new_norm),
        scalar=new.when(config.layer_scalars, 1),
        hyper=None if config.hyper is None else allocate_hyper(config.hyper, hidden, new.device),
        cross=None if config.encoder is None else _allocate_cross(config, config.encoder, new, new_norm),
    )


def _allocate_feed_forward(config: ModelConfig, layer: int, new: Allocator) -> GatedParameters | MoeParameters:
    moe = config.moe
    if moe is None or moe.beside or layer not in moe.layers:
        return _allocate_gated(config, config.intermediate_size_of(layer), new)
    return _allocate_moe(config, moe, new, layer)


def _allocate_cross(config: ModelConfig, encoder: ModelConfig, new: Allocator, new_norm: Allocator) -> CrossParameters:
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    return CrossParameters(
        q=new.linear(q_rows, hidden),
        kv=new.linear(2 * kv_rows, encoder.hidden_size),
        o=new.linear(hidden, q_rows),
        before=new_norm(hidden),
        behind=new_norm(hidden),
    )


def _allocate_any_attention(config: ModelConfig, layer: int, new: Allocator, new_norm: Allocator) -> AnyAttention:
    if config.recurrent is not None and layer in config.recurrent.layers:
        return allocate_recurrent(config.recurrent, config.hidden_size, new)
    if config.compressed is not None:
        exact, sizes = Allocator(torch.float32, new.device), (config.hidden_size, config.num_heads, config.head_dim)
        return allocate_shared(config.compressed, layer, *sizes, new, new_norm, exact)
    if config.latent is not None:
        return _allocate_latent(config, config.latent, layer, new, new_norm)
    return _allocate_attention(config, layer, new, new_norm)


def _allocate_attention(config: ModelConfig, layer: int, new: Allocator, new_norm: Allocator) -> AttentionParameters:
    hidden, head_dim = config.hidden_size, config.heads_of(layer).head_dim
    reads = layer in config.readers
    return AttentionParameters(
        qkv=new.linear(sum(config.qkv_heads(layer)) * head_dim, hidden, biased=config.qkv_bias),
        q_norm=new_norm.when(config.qk_norm, head_dim),
        k_norm=new_norm.when(config.qk_norm and not reads, head_dim),
        sinks=new.when(config.attention_sinks, config.num_heads),
        o=new.linear(hidden, config.num_heads * head_dim, biased=config.o_bias),
    )


def _allocate_latent(
    config: ModelConfig, latent: LatentConfig, layer: int, new: Allocator, new_norm: Allocator
) -> LatentParameters:
    hidden, heads, index = config.hidden_size, latent.heads, latent.index
    query_rows = config.num_heads * latent.query_dim
    first_rows = latent.q_rank or query_rows
    down_rows = first_rows + latent.rank + latent.rotated
    down = new.linear(down_rows, hidden, biased=latent.bias)
    if latent.bias and latent.q_rank is None:
        down.slice(0, first_rows).tensors()["bias"].zero_()  # q's only map has none
    return LatentParameters(
        down=down,
        q_norm=new_norm.when(latent.q_rank is not None, first_rows),
        q_up=None if latent.q_rank is None else new.linear(query_rows, first_rows),
        latent_norm=new_norm(latent.rank),
        up=new.linear(config.num_heads * (heads.key_dim + heads.value_dim), latent.rank),
        o=new.linear(hidden, config.num_heads * heads.value_dim, biased=config.o_bias),
        index=_allocate_index(config, index, first_rows, new, new_norm) if index and layer in index.layers else None,
    )


def _allocate_index(
    config: ModelConfig, index: IndexConfig, q_rank: int, new: Allocator, new_norm: Allocator
) -> IndexParameters:
    return IndexParameters(
        q_up=new.linear(index.num_heads * index.head_dim, q_rank),
        key=new.linear(index.head_dim, config.hidden_size),
        key_norm=Linear(new_norm(index.head_dim), new_norm(index.head_dim)),
        weights=Allocator(torch.float32, new.device).dense(index.num_heads, config.hidden_size),
    )


def _allocate_gated(config: ModelConfig, intermediate: int, new: Allocator) -> GatedParameters:
    return GatedParameters(
        gate_up=new.linear(config.up_parts * intermediate, config.hidden_size, biased=config.mlp_bias),
        down=new.linear(config.hidden_size, intermediate, biased=config.mlp_bias),
    )


def _allocate_moe(config: ModelConfig, moe: MoeConfig, new: Allocator, layer: int | None = None) -> MoeParameters:
    hidden, in_float32, held = config.hidden_size, Allocator(torch.float32, new.device), len(config.experts)
    hashed, latent = layer in moe.hashed, moe.latent_size
    width, biased = latent or hidden, config.mlp_bias
    experts = partial(new.stack, held, biased=moe.bias, transposed=moe.names.transposed)
    return MoeParameters(
        router=(in_float32 if moe.float32_router else new).dense(moe.num_experts, hidden, biased=moe.bias),
        correction=in_float32.when(moe.routing.corrected and not hashed, moe.num_experts),
        table=Allocator(torch.int64, new.device).when(hashed, config.vocab_size, moe.routing.top_k),
        shared=_allocate_gated(config, moe.shared_size, new) if moe.shared_size else None,
        gate_up=experts(config.up_parts * moe.intermediate_size, width),
        down=experts(width, moe.intermediate_size),
        factors=new.when(moe.beside, moe.num_experts),
        shared_gate=None if moe.names.shared_gate is None else new.dense(1, hidden),
        into_latent=None if latent is None else new.linear(latent, hidden, biased=biased),
        from_latent=None if latent is None else new.linear(hidden, latent, biased=biased),
    )


def _allocate_beside(config: ModelConfig, moe: MoeConfig, new: Allocator, new_norm: Allocator) -> BesideParameters:
    norms = [new_norm(config.hidden_size) for _ in range(3)]
    return BesideParameters(_allocate_moe(config, moe, new), new_norm(config.hidden_size), *norms)


def _allocate_per_layer(
    config: ModelConfig, per_layer: PerLayerConfig, new: Allocator, new_norm: Allocator
) -> PerLayerParameters:
    hidden, width = config.hidden_size, per_layer.width
    gate, projection = new.linear(width, hidden), new.linear(hidden, width)
    return PerLayerParameters(gate, projection, new_norm(hidden))


def _allocate_tables(
    config: ModelConfig, per_layer: PerLayerConfig, new: Allocator, new_norm: Allocator
) -> PerLayerTables:
    rows = config.num_layers * per_layer.width
    projection = new.linear(rows, config.hidden_size)
    return PerLayerTables(new.dense(per_layer.vocab_size, rows), projection, new_norm(per_layer.width))
