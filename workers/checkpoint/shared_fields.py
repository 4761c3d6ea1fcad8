"""Fields of config.json that families share, as far as they need no torch: first_checks() reads them before all."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields

REQUIRED = ("num_attention_heads", "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers",
            "max_position_embeddings")  # fmt: skip
MAX_HEADS = 1 << 14  # more than any model has
GATED = ("silu", "swish", "gelu_pytorch_tanh")  # the activations that are served, by their names in config.json
WITH_ALL = frozenset({"experts", "shared experts", "groups of experts", "latent attention"})
"""Features that a model may have whose family reads hidden_act and one RoPE for all layers."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def check_shared(fields: Fields, has: AbstractSet[str]) -> None:
    """Checks those that are there, or must be, in the words of read_dense_config(). has: the model's structure().
    Raises InvalidConfig and UnsupportedFeature."""
    if "num_attention_heads" in fields:
        read_heads(fields, 1)
    if not has <= WITH_ALL:
        return
    for name in REQUIRED:
        fields.integer(name, minimum=1)
    if "hidden_act" in fields:
        read_activation_name(fields, "hidden_act", "", GATED)
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.section(name)
        if not any(isinstance(rope.raw(one), dict) for one in rope.names()):  # else layers differ
            read_rope_type(rope)


def read_heads(fields: Fields, num_kv_heads: int | None) -> tuple[int, int]:
    """num_attention_heads and num_key_value_heads. num_kv_heads: when absent; None: the field is required."""
    num_heads = fields.integer("num_attention_heads", minimum=1, maximum=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", num_kv_heads, minimum=1)
    if num_heads % num_kv_heads:
        raise fields.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    return num_heads, num_kv_heads


def read_activation_name(fields: Fields, name: str, default: str, served: Iterable[str]) -> str:
    """Returns the field `name`, one of `served`."""
    value = fields.text(name, default)
    if value not in served:
        raise UnsupportedFeature(f"{fields.source}: {name} is {value!r}; only {', '.join(served)} are implemented")
    return value


def read_rope_type(scaling: Fields) -> str:
    """One of ROPE_TYPES. The first Phi 3 checkpoints call longrope "su" and "yarn"."""
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type in ("su", "yarn") and "short_factor" in scaling:
        return "longrope"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedFeature(
            f"{scaling.source}: rope_type is {rope_type!r}; only {', '.join(ROPE_TYPES)} are implemented"
        )
    return rope_type
