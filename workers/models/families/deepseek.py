"""DeepSeek-V2: latent attention; shared and routed experts behind a few dense layers, chosen within groups.

DeepSeek-V3: sigmoid scores, a learned correction of the choice, and groups ranked by their two best. Layers for
multi-token prediction, which follow the others in a checkpoint, are read where they draft.
"""

import dataclasses
from collections.abc import Callable

from tandem.cache.plan.rope import yarn_magnitude
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.models.config import MAX_LAYERS, ModelConfig, read_dense_config
from tandem.workers.models.latent import LatentConfig, read_latent
from tandem.workers.models.moe import GATED_NAMES, MoeConfig, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.routing import GroupLimit, Routing

METHODS = ("greedy", "group_limited_greedy")


def read_deepseek_v2(fields: Fields) -> ModelConfig:
    _refuse_others(fields, scoring_func="softmax", norm_topk_prob=False)
    method = fields.text("topk_method", "greedy")
    if method not in METHODS:
        raise UnsupportedFeature(f"{fields.source}: topk_method is {method!r}; only {', '.join(METHODS)} are served")

    def route(moe: MoeConfig) -> Routing:
        groups = _read_group_limit(fields, moe, counted=1) if method == "group_limited_greedy" else None
        scale = fields.number("routed_scaling_factor", 1.0)
        return dataclasses.replace(moe.routing, groups=groups, scale=scale)

    config = _read_both(fields, read_latent(fields, interleaved=True), route)
    return dataclasses.replace(config, mlp_bias=fields.boolean("mlp_bias", False))


def read_deepseek_v3(fields: Fields) -> ModelConfig:
    _refuse_others(fields, scoring_func="sigmoid", topk_method="noaux_tc")

    def route(moe: MoeConfig) -> Routing:
        groups, scale = _read_group_limit(fields, moe, counted=2), fields.number("routed_scaling_factor", 2.5)
        return dataclasses.replace(moe.routing, sigmoid=True, groups=groups, corrected=True, scale=scale)

    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    normalize = fields.boolean("norm_topk_prob", True)
    config = _read_both(fields, latent, route, normalize=normalize, num_shared=1, num_dense=3)
    extra = fields.integer("num_nextn_predict_layers", 1, maximum=MAX_LAYERS)
    return dataclasses.replace(config, num_extra_layers=extra)


def _read_both(
    fields: Fields,
    latent: LatentConfig,
    route: Callable[[MoeConfig], Routing],
    *,
    normalize: bool = False,
    num_shared: int = 2,
    num_dense: int = 0,
) -> ModelConfig:
    """route: the routing of what read_moe has read. num_shared, num_dense: of shared experts and of layers without
    experts, when absent, as in transformers."""
    _refuse_others(fields, moe_layer_freq=1)
    config = read_dense_config(
        fields,
        num_kv_heads=fields.integer("num_attention_heads", minimum=1),
        head_dim=latent.query_dim,
        rope=lambda of, _: read_rope(of, latent.rotated),
    )
    moe = read_moe(
        fields,
        GATED_NAMES,
        normalize=normalize,
        layers=frozenset(range(fields.integer("first_k_dense_replace", num_dense), config.num_layers)),
        intermediate_size="moe_intermediate_size",
        count="n_routed_experts",
    )
    moe = dataclasses.replace(
        moe,
        routing=route(moe),
        shared_size=moe.intermediate_size * fields.integer("n_shared_experts", num_shared, minimum=1),
        float32_router=True,
    )
    scale, rope = latent.query_dim**-0.5, config.rope
    if rope.rope_type != "default" and rope.mscale_all_dim:
        scale *= yarn_magnitude(rope.factor, rope.mscale_all_dim) ** 2
    return dataclasses.replace(config, latent=latent, moe=moe, attn_scale=scale, o_bias=latent.bias)


def _read_group_limit(fields: Fields, moe: MoeConfig, counted: int) -> GroupLimit:
    """n_group and topk_group, which must leave each token as many experts as it takes. Raises InvalidConfig."""
    num_groups, kept = fields.integer("n_group", minimum=1), fields.integer("topk_group", minimum=1)
    size = moe.num_experts // num_groups
    if moe.num_experts % num_groups or size < counted:
        raise fields.invalid(
            "n_group", f"a divisor of the number of experts, {moe.num_experts}, that leaves {counted} or more to each"
        )
    if kept > num_groups or kept * size < moe.routing.top_k:
        raise fields.invalid(
            "topk_group", f"at most n_group, {num_groups}, and enough for num_experts_per_tok, {moe.routing.top_k}"
        )
    return GroupLimit(num_groups, kept, counted)


def _refuse_others(fields: Fields, **accepted: object) -> None:
    """UnsupportedFeature where a field is there and has another value: transformers knows only this one."""
    for name, value in accepted.items():
        if name in fields and fields.raw(name) != value:
            raise UnsupportedFeature(f"{fields.source}: {name} is {fields.raw(name)!r}; only {value!r} is served")
