"""Qwen3-Next and Qwen3.5, text: a gated delta rule in three of four layers, and attention with a gated output, which
rotates a quarter of each head, in the others. Experts and a gated shared one, or a dense feed-forward.

Of the models for images the text decoder is served: their vision weights are not read. For text the three positions of
its RoPE are equal, so that RoPE is the usual one. The layer for multi-token prediction is read where it drafts.
"""

import dataclasses
from functools import partial

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import MAX_LAYERS, ModelConfig, read_dense_config
from tandem.workers.models.families.deepseek import refuse_others
from tandem.workers.models.families.llama4 import fields_of_text
from tandem.workers.models.moe import ExpertNames, read_moe
from tandem.workers.models.recurrent.fields import read_recurrent
from tandem.workers.models.rope_fields import read_rope

NAMES = ExpertNames(
    block="mlp",
    router="gate",
    projections=("gate_proj", "up_proj", "down_proj"),
    shared="shared_expert",
    shared_gate="shared_expert_gate",
)
# When absent, as in transformers.
HEAD_DIM, ROTATED, EXPERT_SIZE = 256, 0.25, 512
SKIPPED = ("model.visual.", "visual.")


def read_qwen3_next(fields: Fields) -> ModelConfig:
    config = _read_hybrid(fields, num_kv_heads=2, by_key_head=True, extra="num_nextn_predict_layers")
    if fields.integer("num_experts", 512) == 0:
        return config
    step = fields.integer("decoder_sparse_step", 1, minimum=1)
    dense = fields.integers("mlp_only_layers", "layer index")
    layers = frozenset(layer for layer in range(step - 1, config.num_layers, step) if layer not in dense)
    return _with_experts(config, fields, layers, normalize=fields.boolean("norm_topk_prob", True))


def read_qwen3_5(fields: Fields) -> ModelConfig:
    return _read_hybrid(fields, num_kv_heads=4, by_key_head=False)


def read_qwen3_5_moe(fields: Fields) -> ModelConfig:
    sizes = {"intermediate_size": fields.integer("moe_intermediate_size", EXPERT_SIZE, minimum=1)}  # no layer is dense
    fields = Fields({**{name: fields.raw(name) for name in fields.names()}, **sizes}, fields.source)
    config = _read_hybrid(fields, num_kv_heads=2, by_key_head=False)
    return _with_experts(config, fields, frozenset(range(config.num_layers)), normalize=True)


def read_qwen3_5_of_images(fields: Fields) -> ModelConfig:
    return read_qwen3_5(_fields_of_text(fields))


def read_qwen3_5_moe_of_images(fields: Fields) -> ModelConfig:
    return read_qwen3_5_moe(_fields_of_text(fields))


def _fields_of_text(fields: Fields) -> Fields:
    """Returns the text's fields; embeddings are tied where the model's are."""
    text = fields_of_text(fields)
    values = {name: text.raw(name) for name in text.names()}
    return Fields({**values, "tie_word_embeddings": fields.boolean("tie_word_embeddings", False)}, text.source)


def _read_hybrid(
    fields: Fields, *, num_kv_heads: int, by_key_head: bool, extra: str = "mtp_num_hidden_layers"
) -> ModelConfig:
    """extra: the field that counts layers for multi-token prediction."""
    refuse_others(fields, hidden_act="silu", attn_output_gate=True)
    config = read_dense_config(
        fields,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        attention_bias=False,
        rope=partial(read_rope, partial_rotary=True, default_fraction=ROTATED),
        layer_types=False,
    )
    return dataclasses.replace(
        config,
        recurrent=read_recurrent(fields, config.num_layers, by_key_head=by_key_head),
        gated_output=True,
        qk_norm=True,
        float32_norms=True,
        norm_offset=1.0,
        weight_prefix=("model.language_model.", "model."),
        skipped_weights=SKIPPED,
        num_extra_layers=fields.integer(extra, 1, maximum=MAX_LAYERS),
        extra_root="mtp",
    )


def _with_experts(config: ModelConfig, fields: Fields, layers: frozenset[int], *, normalize: bool) -> ModelConfig:
    if not layers:
        return config
    size = "moe_intermediate_size"
    moe = read_moe(fields, NAMES, normalize=normalize, layers=layers, intermediate_size=size, count="num_experts")
    shared_size = fields.integer("shared_expert_intermediate_size", EXPERT_SIZE, minimum=1)
    return dataclasses.replace(config, moe=dataclasses.replace(moe, shared_size=shared_size))
