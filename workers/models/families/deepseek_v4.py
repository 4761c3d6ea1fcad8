"""DeepSeek-V4: a window of K and V that are the same numbers, compressed entries next to it, a residual of several
streams, and experts that a table of tokens chooses in the first layers."""

import dataclasses

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.models.activation import LimitedSilu
from tandem.workers.models.compressed.fields import read_compressed, read_hyper, read_mlp_kinds, read_rotated
from tandem.workers.models.compressed.weight_names import RENAMES
from tandem.workers.models.config import ModelConfig, read_dense_config
from tandem.workers.models.moe import ExpertNames, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.routing import SCORES

NAMES = ExpertNames(block="ffn", router="gate", projections=("w1", "w3", "w2"))
MAIN, COMPRESS = "main", "compress"
# When absent, as in transformers.
HEAD_DIM, SIZE, EXPERTS, CHOSEN, SCALE, LIMIT, THETA, COMPRESS_THETA = 512, 2048, 256, 6, 1.5, 10.0, 1e4, 160_000.0
ROPE_TYPES = ("default", "yarn")
ONLY = {"num_key_value_heads": 1, "attention_bias": False, "mlp_bias": False, "norm_topk_prob": True}
EXPERT_DTYPES = (None, "fp4", "fp8")  # with other weights in 8 bits; the files say which it is


def read_deepseek_v4(fields: Fields) -> ModelConfig:
    for name, value in ONLY.items():
        if name in fields and fields.raw(name) != value:
            raise UnsupportedFeature(f"{fields.source}: {name} is {fields.raw(name)!r}; only {value!r} is served")
    if fields.raw("expert_dtype") not in EXPERT_DTYPES:
        shown = SHOWN.repr(fields.raw("expert_dtype"))
        raise UnsupportedFeature(f"{fields.source}: expert_dtype is {shown}; it must be 'fp4' or 'fp8'")
    fields = _with_rope(fields)
    config = read_dense_config(
        fields,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        rope=lambda of, head_dim: read_rope(of, head_dim, partial_rotary=True, layer_type=COMPRESS),
        layer_types=False,
    )
    main = read_rope(fields, config.head_dim, partial_rotary=True, layer_type=MAIN)
    for rope in (config.rope, main):
        if rope.rope_type not in ROPE_TYPES:
            raise UnsupportedFeature(
                f"{fields.source}: rope_type is {rope.rope_type!r}; DeepSeek-V4 is served with {', '.join(ROPE_TYPES)}"
            )
    compressed = read_compressed(fields, config.num_layers, config.num_heads, config.head_dim)
    scores = fields.text("scoring_func", "sqrtsoftplus")
    if scores not in SCORES:
        raise UnsupportedFeature(f"{fields.source}: scoring_func is {scores!r}; only {', '.join(SCORES)} are served")
    moe = read_moe(fields, NAMES, normalize=True, intermediate_size="moe_intermediate_size", count="n_routed_experts")
    kinds = read_mlp_kinds(fields, config.num_layers)
    routing = dataclasses.replace(
        moe.routing, scores=scores, corrected=True, scale=fields.number("routed_scaling_factor", SCALE)
    )
    return dataclasses.replace(
        config,
        local_rope=main,
        layer_windows=(compressed.window,) * config.num_layers,
        compressed=compressed,
        hyper=read_hyper(fields),
        activation=LimitedSilu(fields.number("swiglu_limit", LIMIT, positive=True)),
        float32_norms=True,
        moe=dataclasses.replace(
            moe,
            routing=routing,
            shared_size=moe.intermediate_size * fields.integer("n_shared_experts", 1, minimum=1, maximum=1),
            hashed=frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe"),
        ),
        weight_renames=RENAMES,
        skipped_weights=("mtp.", "model.mtp."),
    )


def _with_rope(fields: Fields) -> Fields:
    """Adds the RoPE of both kinds of layers, in the form of transformers 5, and all sizes that are absent."""
    values = {name: fields.raw(name) for name in fields.names()}
    scaling = values.pop("rope_scaling", None) or values.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise fields.invalid("rope_parameters", "an object")
    main, compress = scaling.get(MAIN), scaling.get(COMPRESS)
    if not (isinstance(main, dict) and isinstance(compress, dict)):
        head_dim = fields.integer("head_dim", HEAD_DIM, minimum=2)
        part = {"partial_rotary_factor": read_rotated(fields, head_dim) / head_dim}
        main = {**part, "rope_type": "default", "rope_theta": fields.number("rope_theta", THETA)}
        theta = fields.number("compress_rope_theta", COMPRESS_THETA)
        given = {name: value for name, value in scaling.items() if name not in (MAIN, COMPRESS)}
        compress = {**given, **part, "rope_theta": theta}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
    sizes = {
        "head_dim": HEAD_DIM,
        "moe_intermediate_size": SIZE,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    }
    values = {**sizes, **values, "rope_parameters": {MAIN: main, COMPRESS: compress}}
    values["intermediate_size"] = values["moe_intermediate_size"]
    return Fields(values, fields.source)
