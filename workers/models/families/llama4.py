"""Llama 4, text: chunked attention in three of four layers, and no RoPE in the others; one routed expert and a shared.

Of Llama4ForConditionalGeneration the text decoder is served: its vision weights are not read.
"""

import dataclasses
from functools import partial

from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.temperature import Temperature
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import ExpertNames, MoeConfig, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.window_fields import ChunkedConfig

NAMES = ExpertNames("feed_forward", "router", projections=None, transposed=True, shared="shared_expert")
# When absent, as in transformers.
HEAD_DIM, EPS, THETA, DENSE_SIZE, CHUNK, FULL_EVERY, FLOOR, SCALE = 128, 1e-5, 5e5, 16384, 8192, 4, 8192, 0.1
ROPE_TYPES = ("default", "linear", "llama3")  # those that keep the length of q and k, which are normalised after it
OF_WHOLE = ("architectures", "dtype", "torch_dtype", "quantization_config")  # not in text_config, or not always
TOKENS = ("bos_token_id", "eos_token_id")  # of the whole model, where text_config has none
CHUNKED, FULL = "chunked_attention", "full_attention"


def read_llama4(fields: Fields) -> ModelConfig:
    config = read_dense_config(
        fields,
        head_dim=HEAD_DIM,
        attention_bias=False,
        rms_norm_eps=EPS,
        rope=partial(read_rope, default_theta=THETA),
        layer_types=False,
    )
    if config.rope.rope_type not in ROPE_TYPES:
        raise UnsupportedFeature(
            f"{fields.source}: rope_type is {config.rope.rope_type!r}; Llama 4 is served with {', '.join(ROPE_TYPES)}"
        )
    return dataclasses.replace(
        config,
        intermediate_size=fields.integer("intermediate_size_mlp", DENSE_SIZE, minimum=1),
        moe=_read_moe(fields, config.num_layers),
        chunked=_read_chunked(fields, config.num_layers),
        rope=RopeParameters("none", 0),
        local_rope=config.rope,
        feed_forward_block=NAMES.block,
    )


def read_llama4_of_images(fields: Fields) -> ModelConfig:
    config = read_llama4(fields_of_text(fields))
    skipped = ("vision_model.", "multi_modal_projector.")
    return dataclasses.replace(config, weight_prefix=("language_model.", ""), skipped_weights=skipped)


def fields_of_text(fields: Fields) -> Fields:
    """Returns the fields of text_config, and the whole model's fields that text_config may lack."""
    text = fields.section("text_config")
    values = {name: text.raw(name) for name in text.names()}
    values |= {name: fields.raw(name) for name in OF_WHOLE if name in fields}
    values |= {name: fields.raw(name) for name in TOKENS if name not in text}
    return Fields(values, text.source)


def _read_chunked(fields: Fields, num_layers: int) -> ChunkedConfig:
    rotated = _read_rotated(fields, num_layers)
    kinds = fields.raw("layer_types")
    expected = [CHUNKED if layer in rotated else FULL for layer in range(num_layers)]
    if kinds is not None and kinds != expected:
        raise UnsupportedFeature(
            f"{fields.source}: layer_types and no_rope_layers disagree; {CHUNKED} is served in layers with RoPE, "
            f"{FULL} in those without"
        )
    if "attention_chunk_size" in fields.names() and fields.raw("attention_chunk_size") is None:
        raise fields.invalid("attention_chunk_size", "an integer of at least 1")
    return ChunkedConfig(
        size=fields.integer("attention_chunk_size", CHUNK, minimum=1),
        layers=rotated,
        qk_norm=fields.boolean("use_qk_norm", True),
        temperature=_read_temperature(fields),
    )


def _read_rotated(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers with RoPE: no_rope_layers has 1 for them, whatever its name says."""
    given = fields.integers("no_rope_layers", "0 or 1")
    if not given:
        every = fields.integer("no_rope_layer_interval", FULL_EVERY, minimum=1)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every)
    if len(given) < num_layers or max(given) > 1:
        raise fields.invalid("no_rope_layers", f"{num_layers} times 0 or 1, one for each layer")
    return frozenset(layer for layer in range(num_layers) if given[layer])


def _read_temperature(fields: Fields) -> Temperature | None:
    """attn_temperature_tuning is a boolean; the first releases have a number, which means true."""
    name = "attn_temperature_tuning"
    if not isinstance(fields.raw(name), int | None):
        raise fields.invalid(name, "true or false")
    if name in fields.names() and not fields.raw(name):
        return None
    return Temperature(fields.integer("floor_scale", FLOOR, minimum=1), fields.number("attn_scale", SCALE))


def _read_moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    step = fields.integer("interleave_moe_layer_step", 1, minimum=1)
    layers = range(step - 1, num_layers, step)
    if "moe_layers" in fields:
        layers = fields.integers("moe_layers", "layer index")
    held = frozenset(layer for layer in layers if layer < num_layers)
    if not held:
        return None
    moe = read_moe(fields, NAMES, normalize=False, layers=held)
    routing = dataclasses.replace(moe.routing, scores="sigmoid", scales_input=True)
    return dataclasses.replace(moe, routing=routing, shared_size=moe.intermediate_size)
