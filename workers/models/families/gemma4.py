"""Gemma 4, text: Gemma 3 with other heads in layers that see all, layers that read the K and V of others, an input for
each layer, and in some sizes experts next to the dense feed-forward.

Gemma4ForConditionalGeneration is served by its text decoder: its weights for images and sound are not read.
"""

import dataclasses
import math
from functools import partial

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import HeadShape, ModelConfig, PerLayerConfig, read_dense_config
from tandem.workers.models.families.llama4 import fields_of_text
from tandem.workers.models.moe import ExpertNames, MoeConfig, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import Windows, read_size

NAMES = ExpertNames(block="", router="router.proj", projections=None)
# When absent, as in transformers.
HEAD_DIM, FULL_HEAD_DIM, KV_HEADS, WINDOW, FULL_EVERY, PER_LAYER_VOCAB, PER_LAYER_SIZE = (
    256,
    512,
    4,
    512,
    6,
    262144,
    256,
)
FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
TOWERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")


def read_gemma4(fields: Fields) -> ModelConfig:
    if fields.raw("use_bidirectional_attention") == "all":
        raise UnsupportedFeature(
            f"{fields.source}: use_bidirectional_attention is 'all'; only causal decoders are served"
        )
    fields = _with_rope(fields)
    config = read_dense_config(
        fields,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        attention_bias=False,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        windows=Windows(read_size(fields, WINDOW), full_every=FULL_EVERY),
        rope=partial(read_rope, layer_type="sliding_attention"),
    )
    windows = (*(config.layer_windows or (None,) * config.num_layers)[:-1], None)  # the last layer sees all
    keys_as_values = fields.boolean("attention_k_eq_v", False)
    full = _read_full_heads(fields, windows, config, keys_as_values)
    config = dataclasses.replace(
        config,
        layer_windows=windows,
        full_heads=full,
        keys_as_values=keys_as_values,
        value_norm=True,
        qk_norm=True,
        local_rope=config.rope,
        rope=read_rope(fields, full.head_dim, layer_type="full_attention", default_theta=1e6),
        float32_norms=True,
        out_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
        attn_scale=1.0,
        final_softcap=fields.number_or_null("final_logit_softcapping", None),
        per_layer=_read_per_layer(fields, config.vocab_size),
        layer_scalars=True,
        wide_readers=fields.boolean("use_double_wide_mlp", False),
        moe=_read_moe(fields),
    )
    return dataclasses.replace(config, num_readers=_read_readers(fields, config))


def read_gemma4_of_images(fields: Fields) -> ModelConfig:
    config = read_gemma4(fields_of_text(fields))
    skipped = tuple(f"model.{tower}." for tower in TOWERS)
    return dataclasses.replace(config, weight_prefix=("model.language_model.", "model."), skipped_weights=skipped)


def _with_rope(fields: Fields) -> Fields:
    """Adds the RoPE of layers that see all, where rope_parameters is absent."""
    if "rope_parameters" in fields:
        return fields
    values = {name: fields.raw(name) for name in fields.names()}
    return Fields({**values, "rope_parameters": {"full_attention": FULL_ROPE}}, fields.source)


def _read_full_heads(
    fields: Fields, windows: tuple[int | None, ...], config: ModelConfig, keys_as_values: bool
) -> HeadShape:
    """Reads global_head_dim and its neighbour, or the per_layer_config that transformers writes for them."""
    if "per_layer_config" not in fields:
        kv_heads = config.num_kv_heads
        if keys_as_values:
            kv_heads = fields.integer("num_global_key_value_heads", kv_heads, minimum=1)
        return _checked(
            fields, config, HeadShape(kv_heads, fields.integer("global_head_dim", FULL_HEAD_DIM, minimum=2))
        )
    layers = fields.section("per_layer_config")
    full = [str(layer) for layer, window in enumerate(windows) if window is None]
    found = {
        HeadShape(
            layer.integer("num_key_value_heads", config.num_kv_heads, minimum=1),
            layer.integer("head_dim", config.head_dim, minimum=2),
        )
        for layer in map(layers.section, full)
    }
    others = {name for layer in full for name in layers.section(layer).names()} - {"head_dim", "num_key_value_heads"}
    if set(layers.names()) - set(full) or len(found) > 1 or others:
        raise UnsupportedFeature(
            f"{fields.source}: per_layer_config is of layers {', '.join(layers.names())}; the same head_dim and "
            f"num_key_value_heads for the layers that see all, {', '.join(full)}, are served"
        )
    return _checked(fields, config, found.pop())


def _checked(fields: Fields, config: ModelConfig, heads: HeadShape) -> HeadShape:
    if config.num_heads % heads.num_kv_heads or heads.head_dim % 2:
        raise UnsupportedFeature(
            f"{fields.source}: layers that see all have {heads.num_kv_heads} KV heads of {heads.head_dim}; a divisor "
            f"of num_attention_heads, {config.num_heads}, and an even size are served"
        )
    return heads


def _read_readers(fields: Fields, config: ModelConfig) -> int:
    count = fields.integer("num_kv_shared_layers", 0)
    spans, first = config.layer_spans, config.num_layers - count
    if first < 1 or set(spans[first:]) - set(spans[:first]):
        raise fields.invalid(
            "num_kv_shared_layers", "a number of last layers, each of a kind that a layer before all of them has"
        )
    return count


def _read_per_layer(fields: Fields, vocab_size: int) -> PerLayerConfig | None:
    width = fields.integer("hidden_size_per_layer_input", PER_LAYER_SIZE)
    if not width:
        return None
    return PerLayerConfig(fields.integer("vocab_size_per_layer_input", PER_LAYER_VOCAB, minimum=vocab_size), width)


def _read_moe(fields: Fields) -> MoeConfig | None:
    if not fields.boolean("enable_moe_block", False):
        return None
    moe = read_moe(fields, NAMES, normalize=True, intermediate_size="moe_intermediate_size", top_k="top_k_experts")
    return dataclasses.replace(moe, beside=True)
