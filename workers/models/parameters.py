"""The tensors of a dense decoder, fused for few large products, and where each tensor of a checkpoint goes in them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """One layer. Hq, Hkv heads of D; I intermediate, H hidden. Rows are outputs, as in torch.nn.functional.linear.

    qkv [(Hq + 2·Hkv)·D, H]: the rows of q, then k, then v. gate_up [2·I, H]: gate, then up.
    q_norm, k_norm [D]. None where the model has no such tensor.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderParameters:
    """embedding and lm_head [vocab, H] are the same tensor when the embeddings are tied.

    layers is a list so that a decoder can take layer after layer and let go of what it has repacked.
    """

    embedding: Tensor
    layers: list[LayerParameters]
    final_norm: Tensor
    lm_head: Tensor


def allocate_parameters(config: ModelConfig, device: torch.device) -> DecoderParameters:
    """Uninitialised tensors of config.dtype on `device`."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=config.dtype, device=device)

    embedding = new(config.vocab_size, config.hidden_size)
    return DecoderParameters(
        embedding=embedding,
        layers=[_allocate_layer(config, device) for _ in range(config.num_layers)],
        final_norm=new(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, device: torch.device) -> LayerParameters:
    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=config.dtype, device=device)

    def new_if(wanted: bool, *shape: int) -> Tensor | None:
        return new(*shape) if wanted else None

    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    return LayerParameters(
        input_norm=new(hidden),
        qkv=new(qkv_rows, hidden),
        qkv_bias=new_if(config.qkv_bias, qkv_rows),
        q_norm=new_if(config.qk_norm, head_dim),
        k_norm=new_if(config.qk_norm, head_dim),
        o=new(hidden, config.num_heads * head_dim),
        o_bias=new_if(config.o_bias, hidden),
        post_norm=new(hidden),
        gate_up=new(2 * intermediate, hidden),
        gate_up_bias=new_if(config.mlp_bias, 2 * intermediate),
        down=new(hidden, intermediate),
        down_bias=new_if(config.mlp_bias, hidden),
    )


def checkpoint_places(config: ModelConfig, parameters: DecoderParameters) -> dict[str, Tensor]:
    """Hugging Face's tensor names and, for each, the contiguous view of `parameters` that it fills."""
    places = {"model.embed_tokens.weight": parameters.embedding, "model.norm.weight": parameters.final_norm}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = parameters.lm_head
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_parts = (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows))
    gate_up_parts = (("gate_proj", config.intermediate_size), ("up_proj", config.intermediate_size))
    for index, layer in enumerate(parameters.layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        whole = {
            f"model.layers.{index}.input_layernorm.weight": layer.input_norm,
            f"model.layers.{index}.post_attention_layernorm.weight": layer.post_norm,
            f"{attention}.q_norm.weight": layer.q_norm,
            f"{attention}.k_norm.weight": layer.k_norm,
            f"{attention}.o_proj.weight": layer.o,
            f"{attention}.o_proj.bias": layer.o_bias,
            f"{mlp}.down_proj.weight": layer.down,
            f"{mlp}.down_proj.bias": layer.down_bias,
        }
        places.update({name: tensor for name, tensor in whole.items() if tensor is not None})
        places.update(_split_rows(attention, "weight", layer.qkv, qkv_parts))
        places.update(_split_rows(attention, "bias", layer.qkv_bias, qkv_parts))
        places.update(_split_rows(mlp, "weight", layer.gate_up, gate_up_parts))
        places.update(_split_rows(mlp, "bias", layer.gate_up_bias, gate_up_parts))
    return places


def _split_rows(prefix: str, kind: str, fused: Tensor | None, parts: tuple[tuple[str, int], ...]) -> dict[str, Tensor]:
    if fused is None:
        return {}
    rows = fused.split([count for _, count in parts])
    return {f"{prefix}.{name}.{kind}": part for (name, _), part in zip(parts, rows, strict=True)}
