"""Shards of a model: sizes in their configs, and their slices of the checkpoint's tensors."""

import dataclasses
import re
from collections.abc import Iterator

from torch import Tensor

from tandem.cache.plan.shard import Shard
from tandem.workers.checkpoint.safetensors_file import Slice
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.recurrent.sharding import slices_of_state

# By the last name before `.weight`, `.bias` and the like: the dimension of the weight that the ranks divide.
DIVIDED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "sinks"), 0),  # heads
    **dict.fromkeys(("gate_proj", "up_proj"), 0),  # intermediate size
    **dict.fromkeys(("o_proj", "out_proj", "down_proj"), 1),  # the inputs of the layer's second GEMMs
    **dict.fromkeys(("wq_b", "wo_a", "attn_sink", "w1", "w3"), 0),  # the same, as DeepSeek-V4 has them
    **dict.fromkeys(("wo_b", "w2"), 1),
}
WHOLE_MODULES = ("indexer",)  # each rank has all of it
LAYER = re.compile(r"\.layers\.(\d+)\.")


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the config of one shard of a whole model. InvalidArgument when the ranks cannot divide its sizes.

    num_heads, num_kv_heads, intermediate_size and moe.shared_size become the shard's. num_experts stays, since each
    rank routes to all experts; ModelConfig.experts is the range that the shard holds.
    """
    moe, whole = config.moe, config.latent is not None  # all ranks keep the whole latents
    full, compressed = config.full_heads, config.compressed
    if full is not None:
        full = dataclasses.replace(
            full,
            num_kv_heads=len(shard.kv_heads("num_kv_heads", full.num_kv_heads)),
            replicas=shard.replicas("num_kv_heads", full.num_kv_heads),
        )
    if moe is not None:
        shard.some("num_experts", moe.num_experts)
        moe = dataclasses.replace(moe, shared_size=len(shard.part("shared_size", moe.shared_size)))
    if compressed is not None:  # and the one head of K and V
        groups = len(shard.part("out_groups", compressed.out_groups))
        compressed, whole = dataclasses.replace(compressed, out_groups=groups), True
    return dataclasses.replace(
        config,
        shard=shard,
        num_heads=len(shard.part("num_heads", config.num_heads)),
        num_kv_heads=config.num_kv_heads if whole else len(shard.kv_heads("num_kv_heads", config.num_kv_heads)),
        kv_replicas=1 if whole else shard.replicas("num_kv_heads", config.num_kv_heads),
        intermediate_size=len(shard.part("intermediate_size", config.intermediate_size)),
        full_heads=full,
        moe=moe,
        recurrent=None if config.recurrent is None else config.recurrent.divided(shard),
        compressed=compressed,
        encoder=None if config.encoder is None else shard_config(config.encoder, shard),
    )


def slices_of(name: str, weight: Tensor, config: ModelConfig, stored: tuple[int, ...]) -> list[Slice]:
    """Returns the slices of the stored tensor `name`, of shape `stored`, that fill `weight`, the shard's part.

    Scales of columns are divided like the columns: Format.form has made sure that no group of columns is.
    """
    if config.shard.size == 1:
        return [Slice(weight)]
    if config.encoder is not None and name.startswith(f"{config.encoder.weight_root}."):
        return slices_of(name, weight, config.encoder, stored)
    *module, last = name.split(".")
    if module and module[-1] != "experts" and last not in DIVIDED:
        *module, last = module  # its weight, its bias, or what another form of weight has
    if module[-1:] == ["experts"] and config.moe is not None:  # one tensor for all experts of a layer
        return [Slice(weight, 0, config.experts.start, config.moe.num_experts)]
    if "experts" in module or any(one in module for one in WHOLE_MODULES):  # an expert's is whole, too
        return [Slice(weight)]
    if "lm_head" in (*module, last):
        if weight.shape[0] == config.vocab_size:  # a drafter's
            return [Slice(weight)]
        return [Slice(weight, 0, config.head_part.start, config.vocab_size)]
    layer = LAYER.search(name)
    if config.recurrent is not None and layer is not None and int(layer[1]) in config.recurrent.layers:
        of_state = slices_of_state(config.recurrent, config.shard, name, weight)
        if of_state is not None:
            return of_state
    replicas = _replicas(name, config)
    if last in ("qkv_proj", "gate_up_proj"):
        return list(_fused(weight, _extents(last, config), config.shard, replicas))
    dim = DIVIDED.get(last)
    if dim is None or dim >= weight.dim():
        return [Slice(weight)]
    if dim == 1 and weight.shape[1] == stored[1]:  # a scale for all columns of a row
        return [Slice(weight)]
    extent, shard = weight.shape[dim], config.shard
    replicas = replicas if last in ("k_proj", "v_proj") else 1
    return [Slice(weight, dim, shard.rank // replicas * extent, shard.size // replicas * extent)]


def _replicas(name: str, config: ModelConfig) -> int:
    """Counts ranks that have the same KV heads of the tensor's layer."""
    layer = LAYER.search(name)
    if layer is None or config.full_heads is None or "cross_attn" in name:
        return config.kv_replicas
    return config.heads_of(int(layer[1])).replicas


def _extents(last: str, config: ModelConfig) -> tuple[int, ...]:
    """Returns the rows that the shard holds of each tensor in a fused one."""
    if last == "gate_up_proj":
        return config.intermediate_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return q_rows, kv_rows, kv_rows


def _fused(weight: Tensor, extents: tuple[int, ...], shard: Shard, replicas: int) -> Iterator[Slice]:
    """replicas: of the parts after the first: K and V."""
    counts = [shard.size // (replicas if part and len(extents) > 2 else 1) for part in range(len(extents))]
    total, begin = sum(count * extent for count, extent in zip(counts, extents, strict=True)), 0
    for part, extent, count in zip(weight.split(extents), extents, counts, strict=True):
        yield Slice(part, 0, begin + shard.rank * count // shard.size * extent, total)
        begin += count * extent
