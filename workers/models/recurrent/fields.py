"""Layers that keep a state in place of K and V, as Hugging Face configs write them."""

from dataclasses import dataclass, field, replace
from typing import Self

from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, SsdShape, StateShape
from tandem.cache.plan.shard import Shard
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields

LINEAR, FULL = "linear_attention", "full_attention"
FULL_EVERY = 4  # when full_attention_interval is absent, too, as in transformers
MAX_SIZE = 1 << 16  # of each size; more than any model has


@dataclass(frozen=True)
class RecurrentConfig:
    """layers: those that keep states. block: their submodule, in weight names. A shard has the shape of its own heads,
    and `sharers`, see StateShape.sharers."""

    layers: frozenset[int]
    shape: StateShape
    block: str
    sharers: int = field(default=1, kw_only=True)

    def divided(self, shard: Shard) -> Self:
        """Returns the configuration of one shard of a whole model. InvalidArgument when the ranks cannot divide the
        heads."""
        return replace(self, shape=self.shape.divided(shard), sharers=self.shape.sharers(shard))


@dataclass(frozen=True)
class DeltaNetConfig(RecurrentConfig):
    """The configuration of gated delta rules. by_key_head: the first products have all rows of one key head, its q, k,
    v and gate, then all rows of the next (Qwen3-Next)."""

    shape: DeltaShape
    by_key_head: bool


@dataclass(frozen=True)
class KdaConfig(RecurrentConfig):
    """The configuration of Kimi Delta Attention. Its heads have one size."""

    shape: KdaShape


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """biased, conv_biased: whether products, and the convolution, have biases. The output of each group of heads is
    normalised by itself, by all ranks that share the group."""

    shape: SsdShape
    biased: bool
    conv_biased: bool


def read_recurrent(fields: Fields, num_layers: int, *, by_key_head: bool) -> DeltaNetConfig:
    """Raises InvalidConfig, and UnsupportedFeature for a model of recurrent layers alone."""
    shape = DeltaShape(
        key_heads=fields.integer("linear_num_key_heads", 16, 1, MAX_SIZE),
        value_heads=fields.integer("linear_num_value_heads", 32, 1, MAX_SIZE),
        key_dim=fields.integer("linear_key_head_dim", 128, 1, MAX_SIZE),
        value_dim=fields.integer("linear_value_head_dim", 128, 1, MAX_SIZE),
        tail=fields.integer("linear_conv_kernel_dim", 4, 2, MAX_SIZE) - 1,
    )
    if shape.value_heads % shape.key_heads:
        raise fields.invalid("linear_num_value_heads", f"a multiple of linear_num_key_heads, {shape.key_heads}")
    layers = _read_layers(fields, num_layers)
    if len(layers) == num_layers:
        raise UnsupportedFeature(
            f"{fields.source}: all {num_layers} layers keep recurrent states; at least one of {FULL} is served"
        )
    return DeltaNetConfig(layers, shape, "linear_attn", by_key_head)


def _read_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    kinds = fields.raw("layer_types")
    if kinds is None:
        every = fields.integer("full_attention_interval", FULL_EVERY, minimum=1)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.invalid("layer_types", f"a list of {num_layers}, num_hidden_layers")
    other = [kind for kind in kinds if kind not in (LINEAR, FULL)]
    if other:
        raise UnsupportedFeature(f"{fields.source}: layer_types has {SHOWN.repr(other[0])}; only {LINEAR}, {FULL}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR)
