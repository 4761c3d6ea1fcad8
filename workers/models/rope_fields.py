"""RoPE as Hugging Face configs write it, old and new, into RopeParameters."""

from typing import Any

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.rope import RopeParameters
from tandem.workers.checkpoint.errors import InvalidConfig, UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.shared_fields import read_rope_type

DEFAULT_THETA = 10_000.0


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    partial_rotary: bool = False,
    default_fraction: float = 1.0,
    original_length: int | None = None,
    default_theta: float = DEFAULT_THETA,
    theta_field: str = "rope_theta",
    layer_type: str | None = None,
) -> RopeParameters:
    """`rope_parameters` (transformers 5) or `rope_scaling` next to `rope_theta` (transformers 4).

    As in transformers, a rope_scaling that is not empty goes before rope_parameters, and a field in the object before
    the same field next to it. `type` is an old name of rope_type.

    - partial_rotary: whether the family reads partial_rotary_factor; default_fraction: its value when absent.
    - original_length: original_max_position_embeddings where none is given next to the object.
    - theta_field: the name of the base next to the object.
    - layer_type: the layers meant where rope_parameters has an object for each kind; rope_scaling is that of
      full_attention then.

    Raises UnsupportedFeature for a type not in ROPE_TYPES, and for partial rotation of a family that has none.
    """
    scaling = _scaling(fields, layer_type)
    rope_type = _rope_type(scaling)
    max_position_embeddings = fields.integer("max_position_embeddings", minimum=1)
    original = _original_length(fields, scaling, original_length, max_position_embeddings)
    proportional = rope_type == "proportional"
    fraction = _rotated_fraction(fields, scaling, partial_rotary or proportional, default_fraction)
    try:
        return RopeParameters(
            rope_type=rope_type,
            rotary_dim=head_dim if proportional else int(head_dim * fraction),
            partial_rotary_factor=fraction if proportional else 1.0,
            theta=scaling.number("rope_theta", fields.number(theta_field, default_theta)),
            max_position_embeddings=max_position_embeddings,
            original_max_position_embeddings=original,
            attention_factor=_optional(scaling, "attention_factor"),
            beta_fast=_optional(scaling, "beta_fast") or 32.0,
            beta_slow=_optional(scaling, "beta_slow") or 1.0,
            mscale=_optional(scaling, "mscale"),
            mscale_all_dim=_optional(scaling, "mscale_all_dim"),
            truncate=scaling.boolean("truncate", True),
            **_needed_by(rope_type, scaling, max_position_embeddings / original),
        )
    except InvalidArgument as error:
        raise InvalidConfig(f"{scaling.source}: {error}") from None


def _scaling(fields: Fields, layer_type: str | None) -> Fields:
    if fields.raw("rope_scaling") and layer_type in (None, "full_attention"):
        return fields.section("rope_scaling")
    scaling = fields.section("rope_parameters")
    return scaling if layer_type is None else scaling.section(layer_type)


def _rope_type(scaling: Fields) -> str:
    nested = [name for name in scaling.names() if isinstance(scaling.raw(name), dict)]
    if nested:
        raise UnsupportedFeature(
            f"{scaling.source} differs between layers ({', '.join(nested)}); only one for all layers is implemented"
        )
    return read_rope_type(scaling)


def _rotated_fraction(fields: Fields, scaling: Fields, partial_rotary: bool, default: float) -> float:
    fraction = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", default))
    if fraction != 1 and not partial_rotary:
        raise UnsupportedFeature(f"{fields.source}: partial_rotary_factor is {fraction}; this family takes only 1")
    return fraction


def _needed_by(rope_type: str, scaling: Fields, length_ratio: float) -> dict[str, Any]:
    """The fields that only some types have, and must have. yarn and longrope can compute factor from two lengths."""
    if rope_type == "default":
        return {"factor": 1.0}
    if rope_type == "proportional":
        return {"factor": scaling.number("factor", 1.0)}
    factor = {"factor": scaling.number("factor", length_ratio if rope_type in ("yarn", "longrope") else None)}
    if rope_type == "llama3":
        return factor | {name: scaling.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if rope_type == "longrope":
        return factor | {name: scaling.numbers(name) for name in ("short_factor", "long_factor")}
    return factor


def _original_length(fields: Fields, scaling: Fields, of_family: int | None, max_position_embeddings: int) -> int:
    """Returns the trained length. As in transformers, the model's own field goes before the field in rope_scaling (Phi
    3 began that)."""
    name = "original_max_position_embeddings"
    default = of_family or scaling.integer(name, max_position_embeddings, minimum=1)
    return fields.integer(name, default, minimum=1)


def _optional(scaling: Fields, name: str) -> float | None:
    return scaling.number(name) if name in scaling else None
