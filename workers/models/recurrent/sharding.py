"""Finds the rows of a recurrent layer's stored tensors that a rank holds. recurrent/parameters.py has their names."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from tandem.cache.kernels.recurrent import HeadParts, StateShape
from tandem.cache.plan.shard import HeldNumbers, Shard
from tandem.workers.checkpoint.safetensors_file import Slice
from tandem.workers.models.recurrent.fields import DeltaNetConfig, KdaConfig, RecurrentConfig

BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")


def slices_of_state(config: RecurrentConfig, shard: Shard, name: str, weight: Tensor) -> list[Slice] | None:
    """Returns the slices of the stored tensor `name` that fill `weight`, the shard's part. None: the ranks do not
    divide its rows. config: of the shard."""
    _, _, tensor = name.partition(f".{config.block}.")
    of = tensor.split(".")[0]
    parts, shape = _parts_of(config).get(of), config.shape
    if parts is None:
        return None
    extent = _count(shape.undivided(shard, config.sharers), parts)
    held = list((_by_key_head if of in BY_KEY_HEAD else _held)(shape, parts, shard, config.sharers))
    dim = max(weight.dim() - 2, 0) if of == "A_log" else 0  # KDA has [1, 1, heads, 1], others [heads]
    rows = weight.split([one.count for one in held], dim)
    return [Slice(part, dim, one.whole, extent) for part, one in zip(rows, held, strict=True)]


def _parts_of(config: RecurrentConfig) -> dict[str, HeadParts]:
    """The rows of each tensor that ranks divide, by the tensor's first name within the block."""
    shape, many = config.shape, config.shape.divisor[1]
    values, one, channels = (many, shape.output_dim), (many, 1), shape.channel_parts
    of_heads: dict[str, HeadParts] = {"A_log": (one,), "dt_bias": (one,)}
    if isinstance(config, KdaConfig):
        (of_q, of_k, of_v), product = channels, (values,)
        names = {"q": of_q, "k": of_k, "v": of_v}
        of_channels = {f"{name}_{of}": (part,) for name, part in names.items() for of in ("proj", "conv1d")}
        products = dict.fromkeys(("f_b_proj", "g_b_proj", "dt_bias"), product)
        return of_heads | of_channels | products | {"b_proj": (one,)}
    of_heads["conv1d"] = channels
    if isinstance(config, DeltaNetConfig):
        by_key_head = {"in_proj_qkvz": (*channels, values), "in_proj_ba": (one, one)}
        by_part = {"in_proj_qkv": channels, "in_proj_z": (values,), "in_proj_b": (one,), "in_proj_a": (one,)}
        return of_heads | (by_key_head if config.by_key_head else by_part)
    return of_heads | {"in_proj": (values, *channels, one), "D": (one,), "norm": (values,)}


def _held(shape: StateShape, parts: HeadParts, shard: Shard, sharers: int) -> Iterator[HeldNumbers]:
    return shape.held(parts, shard, sharers)


def _by_key_head(shape: StateShape, parts: HeadParts, shard: Shard, sharers: int) -> Iterator[HeldNumbers]:
    """Does what _held() does, for a tensor that has all rows of one key head, then all of the next. Ranks that share a
    key head divide its values."""
    few, many = shape.divisor
    count = getattr(shape, few)
    one = replace(shape, **{few: 1, many: shape.heads // count})
    among = Shard(shard.rank % sharers, sharers)
    here, there = _count(one, parts), _count(one.undivided(among, sharers), parts)
    for head in range(count):
        begin, whole = head * here, (shard.rank // sharers * count + head) * there
        for held in one.held(parts, among, sharers):
            yield HeldNumbers(begin + held.begin, whole + held.whole, held.count, held.sharers)


def _count(shape: StateShape, parts: HeadParts) -> int:
    return sum(getattr(shape, field) * each for field, each in parts)
