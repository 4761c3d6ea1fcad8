"""The tensors of a decoder, fused for few large products."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.latent import LatentConfig
from tandem.workers.models.moe import MoeConfig


@dataclass(frozen=True, slots=True)
class GatedParameters:
    """A dense feed-forward; a bias is None where there is none."""

    gate_up: Tensor  # [2·I, H]: gate, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [H, I]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MoeParameters:
    """E experts, of which the shard holds L.

    gate_up and down are transposed views when the checkpoint's layout is transposed: rows of the last dimension then
    lie apart.
    """

    router: Tensor  # [E, H]
    router_bias: Tensor | None  # [E]
    correction: Tensor | None  # float32 [E], see Routing
    shared: GatedParameters | None  # a feed-forward that every token takes besides
    gate_up: Tensor  # [L, 2·I, H]
    gate_up_bias: Tensor | None  # [L, 2·I]
    down: Tensor  # [L, H, I]
    down_bias: Tensor | None  # [L, H]


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Hq heads of q and Hkv heads of k and v, of D."""

    qkv: Tensor  # [(Hq + 2·Hkv)·D, H]: the rows of q, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    sinks: Tensor | None  # [Hq]
    o: Tensor  # [H, Hq·D]
    o_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LatentParameters:
    """Hq heads that read latents."""

    down: Tensor  # [Q + rank + rotated, H]: q's first map, or q; the latent; the key that heads share
    down_bias: Tensor | None
    q_norm: Tensor | None  # [Q]; None where q has one map
    q_up: Tensor | None  # [Hq · (key_dim + rotated), Q]; None where q has one map
    latent_norm: Tensor  # [rank]
    up: Tensor  # [Hq, key_dim + value_dim, rank]: see UpProjections
    o: Tensor  # [H, Hq · value_dim]
    o_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. I intermediate, H hidden; rows are outputs, as in torch.nn.functional.linear.

    A tensor is None where the model has none.
    """

    input_norm: Tensor
    attention: AttentionParameters | LatentParameters
    attention_out_norm: Tensor | None
    post_norm: Tensor  # before the feed-forward
    feed_forward: GatedParameters | MoeParameters
    feed_forward_out_norm: Tensor | None

    def norms(self) -> list[Tensor]:
        attention = self.attention
        of_heads = (
            (attention.q_norm, attention.k_norm)
            if isinstance(attention, AttentionParameters)
            else (attention.q_norm, attention.latent_norm)
        )
        norms = (self.input_norm, self.post_norm, *of_heads, self.attention_out_norm, self.feed_forward_out_norm)
        return [norm for norm in norms if norm is not None]


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """embedding and lm_head [vocab, H] are the same tensor when the embeddings are tied.

    layers is a list so that a decoder can take layer after layer and let go of what it has repacked.
    """

    embedding: Tensor
    layers: list[LayerParameters]
    final_norm: Tensor
    lm_head: Tensor

    def norms(self) -> list[Tensor]:
        """The weights of all norms."""
        return [self.final_norm, *(norm for layer in self.layers for norm in layer.norms())]


def allocate_parameters(config: ModelConfig, device: torch.device) -> DecoderParameters:
    """Uninitialised tensors of config.dtype on `device`."""
    new = Allocator(config.dtype, device)
    new_norm = _norm_allocator(config, device)
    embedding = new(config.vocab_size, config.hidden_size)
    return DecoderParameters(
        embedding=embedding,
        layers=[_allocate_layer(config, index, new, new_norm) for index in range(config.num_layers)],
        final_norm=new_norm(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size),
    )


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised tensors of one dtype and device."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def when(self, wanted: bool, *shape: int) -> Tensor | None:
        return self(*shape) if wanted else None


def _norm_allocator(config: ModelConfig, device: torch.device) -> Allocator:
    return Allocator(torch.float32 if config.float32_norms else config.dtype, device)


def _allocate_layer(config: ModelConfig, index: int, new: Allocator, new_norm: Allocator) -> LayerParameters:
    hidden = config.hidden_size
    return LayerParameters(
        input_norm=new_norm(hidden),
        attention=(
            _allocate_attention(config, new, new_norm)
            if config.latent is None
            else _allocate_latent(config, config.latent, new, new_norm)
        ),
        attention_out_norm=new_norm.when(config.out_norms, hidden),
        post_norm=new_norm(hidden),
        feed_forward=(
            _allocate_gated(config, config.intermediate_size, new)
            if config.moe is None or index not in config.moe.layers
            else _allocate_moe(config, config.moe, new)
        ),
        feed_forward_out_norm=new_norm.when(config.out_norms, hidden),
    )


def _allocate_attention(config: ModelConfig, new: Allocator, new_norm: Allocator) -> AttentionParameters:
    hidden, head_dim = config.hidden_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    return AttentionParameters(
        qkv=new(qkv_rows, hidden),
        qkv_bias=new.when(config.qkv_bias, qkv_rows),
        q_norm=new_norm.when(config.qk_norm, head_dim),
        k_norm=new_norm.when(config.qk_norm, head_dim),
        sinks=new.when(config.attention_sinks, config.num_heads),
        o=new(hidden, config.num_heads * head_dim),
        o_bias=new.when(config.o_bias, hidden),
    )


def _allocate_latent(
    config: ModelConfig, latent: LatentConfig, new: Allocator, new_norm: Allocator
) -> LatentParameters:
    hidden, heads = config.hidden_size, latent.heads
    query_rows = config.num_heads * latent.query_dim
    first_rows = latent.q_rank or query_rows
    down_rows = first_rows + latent.rank + latent.rotated
    down_bias = new.when(latent.bias, down_rows)
    if down_bias is not None and latent.q_rank is None:
        down_bias[:first_rows] = 0  # q's only map has none
    return LatentParameters(
        down=new(down_rows, hidden),
        down_bias=down_bias,
        q_norm=new_norm.when(latent.q_rank is not None, first_rows),
        q_up=new.when(latent.q_rank is not None, query_rows, first_rows),
        latent_norm=new_norm(latent.rank),
        up=new(config.num_heads, heads.key_dim + heads.value_dim, latent.rank),
        o=new(hidden, config.num_heads * heads.value_dim),
        o_bias=new.when(config.o_bias, hidden),
    )


def _allocate_gated(config: ModelConfig, intermediate: int, new: Allocator) -> GatedParameters:
    hidden = config.hidden_size
    return GatedParameters(
        gate_up=new(2 * intermediate, hidden),
        gate_up_bias=new.when(config.mlp_bias, 2 * intermediate),
        down=new(hidden, intermediate),
        down_bias=new.when(config.mlp_bias, hidden),
    )


def _allocate_moe(config: ModelConfig, moe: MoeConfig, new: Allocator) -> MoeParameters:
    hidden, in_float32, held = config.hidden_size, Allocator(torch.float32, new.device), len(config.experts)

    def experts(rows: int, columns: int) -> Tensor:
        if moe.names.transposed:
            return new(held, columns, rows).transpose(1, 2)
        return new(held, rows, columns)

    return MoeParameters(
        router=(in_float32 if moe.float32_router else new)(moe.num_experts, hidden),
        router_bias=new.when(moe.bias, moe.num_experts),
        correction=in_float32.when(moe.routing.corrected, moe.num_experts),
        shared=_allocate_gated(config, moe.shared_size, new) if moe.shared_size else None,
        gate_up=experts(2 * moe.intermediate_size, hidden),
        gate_up_bias=new.when(moe.bias, held, 2 * moe.intermediate_size),
        down=experts(hidden, moe.intermediate_size),
        down_bias=new.when(moe.bias, held, hidden),
    )
