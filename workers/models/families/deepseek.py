"""DeepSeek-V2: latent attention; shared and routed experts after a few dense layers, chosen within groups.

DeepSeek-V3: sigmoid scores, a learned correction of the choice, and groups ranked by their two best. Layers for
multi-token prediction, which follow the others in a checkpoint, are read where they draft.

GLM-4-MoE-Lite (GLM-4.7-Flash): as V3, with wider heads.

DeepSeek-V3.2 and GLM-MoE-DSA: as V3, but queries choose the positions that they attend to, by an indexer.
"""

import dataclasses
from collections.abc import Callable

from tandem.cache.plan.rope import yarn_magnitude
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.models.config import MAX_LAYERS, ModelConfig, read_dense_config
from tandem.workers.models.indexer.fields import read_index
from tandem.workers.models.latent import LatentConfig, read_latent
from tandem.workers.models.moe import GATED_NAMES, MoeConfig, read_moe
from tandem.workers.models.rope_fields import read_rope
from tandem.workers.models.routing import GroupLimit, Routing

METHODS = ("greedy", "group_limited_greedy")
INDEXED = ("indexed_attention", "deepseek_sparse_attention")  # its name today, and in transformers before 5.23
MLP_KINDS = ("dense", "sparse")


def read_deepseek_v2(fields: Fields) -> ModelConfig:
    refuse_others(fields, scoring_func="softmax", norm_topk_prob=False)
    method = fields.text("topk_method", "greedy")
    if method not in METHODS:
        raise UnsupportedFeature(f"{fields.source}: topk_method is {method!r}; only {', '.join(METHODS)} are served")

    def route(moe: MoeConfig) -> Routing:
        groups = read_group_limit(fields, moe, counted=1) if method == "group_limited_greedy" else None
        scale = fields.number("routed_scaling_factor", 1.0)
        return dataclasses.replace(moe.routing, groups=groups, scale=scale)

    config = _read_both(fields, read_latent(fields, interleaved=True), route)
    return dataclasses.replace(config, mlp_bias=fields.boolean("mlp_bias", False))


def read_deepseek_v3(fields: Fields) -> ModelConfig:
    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    return read_v3(fields, latent, num_dense=3)


def read_glm4_moe_lite(fields: Fields) -> ModelConfig:
    latent = read_latent(fields, interleaved=fields.boolean("rope_interleave", True))
    config = read_v3(fields, latent, num_dense=1, groups=(1, 1), kinds="mlp_layer_types", scale=1.8)
    return dataclasses.replace(config, rms_norm_eps=fields.number("rms_norm_eps", 1e-5))


def read_deepseek_v32(fields: Fields) -> ModelConfig:
    return _read_with_indexer(fields, num_heads=64, groups=(8, 4), interleaved=False, shares=False)


def read_glm_moe_dsa(fields: Fields) -> ModelConfig:
    config = _read_with_indexer(fields, num_heads=32, groups=(1, 1), interleaved=True, shares=True)
    return dataclasses.replace(config, rms_norm_eps=fields.number("rms_norm_eps", 1e-5))


def _read_with_indexer(
    fields: Fields, *, num_heads: int, groups: tuple[int, int], interleaved: bool, shares: bool
) -> ModelConfig:
    """groups: n_group and topk_group when absent. For the others see read_index. The index keys are rotated as the
    latents' are, whose neighbours are rotated, but for `interleaved`."""
    refuse_others(fields, mlp_bias=False)
    kinds = fields.raw("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind not in INDEXED for kind in kinds)):
        raise UnsupportedFeature(f"{fields.source}: layer_types is {SHOWN.repr(kinds)}; only {INDEXED[0]} is served")
    latent = read_latent(fields, interleaved=True)
    if latent.q_rank is None:
        raise UnsupportedFeature(f"{fields.source}: q_lora_rank is null; an indexer takes what q's first map makes")
    index = read_index(fields, latent.rotated, num_heads=num_heads, interleaved=interleaved, shares=shares)
    latent = dataclasses.replace(latent, index=index)
    return read_v3(fields, latent, num_dense=3, groups=groups, kinds="mlp_layer_types")


def read_v3(
    fields: Fields,
    latent: LatentConfig,
    num_dense: int,
    groups: tuple[int | None, int | None] = (None, None),
    kinds: str | None = None,
    scale: float = 2.5,
) -> ModelConfig:
    """groups: n_group and topk_group when absent; None: they are required. kinds: the field that names dense and sparse
    layers. scale: routed_scaling_factor when absent."""
    refuse_others(fields, scoring_func="sigmoid", topk_method="noaux_tc")

    def route(moe: MoeConfig) -> Routing:
        limit, factor = read_group_limit(fields, moe, 2, groups), fields.number("routed_scaling_factor", scale)
        return dataclasses.replace(moe.routing, scores="sigmoid", groups=limit, corrected=True, scale=factor)

    normalize = fields.boolean("norm_topk_prob", True)
    config = _read_both(fields, latent, route, normalize=normalize, num_shared=1, num_dense=num_dense, kinds=kinds)
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
    kinds: str | None = None,
) -> ModelConfig:
    """route: the routing of what read_moe has read. num_shared, num_dense: of shared experts and of layers without
    experts, when absent, as in transformers. kinds: see read_v3."""
    refuse_others(fields, moe_layer_freq=1)
    config = read_dense_config(
        fields,
        num_kv_heads=fields.integer("num_attention_heads", minimum=1),
        head_dim=latent.query_dim,
        rope=lambda of, _: read_rope(of, latent.rotated),
        layer_types=latent.index is None,
    )
    moe = read_moe(
        fields,
        GATED_NAMES,
        normalize=normalize,
        layers=_read_sparse_layers(fields, config.num_layers, num_dense, kinds),
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


def _read_sparse_layers(fields: Fields, num_layers: int, num_dense: int, kinds: str | None) -> frozenset[int]:
    """The layers with experts: those that the field `kinds` calls sparse, where it is there, or those after the first
    dense ones."""
    if kinds is None or kinds not in fields:
        return frozenset(range(fields.integer("first_k_dense_replace", num_dense), num_layers))
    named = fields.raw(kinds)
    if not isinstance(named, list) or len(named) < num_layers or any(kind not in MLP_KINDS for kind in named):
        raise fields.invalid(kinds, f"dense or sparse for each of {num_layers} layers, num_hidden_layers")
    return frozenset(layer for layer in range(num_layers) if named[layer] == "sparse")


def read_group_limit(
    fields: Fields, moe: MoeConfig, counted: int, absent: tuple[int | None, int | None] = (None, None)
) -> GroupLimit:
    """n_group and topk_group, which must leave each token as many experts as it takes. Raises InvalidConfig."""
    num_groups, kept = (
        fields.integer("n_group", absent[0], minimum=1),
        fields.integer("topk_group", absent[1], minimum=1),
    )
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


def refuse_others(fields: Fields, **accepted: object) -> None:
    """UnsupportedFeature where a field is there and has another value: transformers knows only this one."""
    for name, value in accepted.items():
        if name in fields and fields.raw(name) != value:
            raise UnsupportedFeature(f"{fields.source}: {name} is {fields.raw(name)!r}; only {value!r} is served")
