"""Checks config.json and the weights' headers without torch, whose import takes seconds. Loading checks all again."""

from pathlib import Path

from tandem.workers.checkpoint.architectures import read_architecture
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.header_checks import check_files, check_shapes
from tandem.workers.checkpoint.quantizations import read_method
from tandem.workers.checkpoint.shared_fields import check_shared
from tandem.workers.checkpoint.structure import structure

UNSTRETCHED = ("default", "llama3", "longrope")  # types of RoPE whose length is max_position_embeddings


def first_checks(folder: Path, *, has_weights: bool) -> int | None:
    """The longest sequence that the model takes, where that is plain to see. Raises ModelError.

    has_weights: whether the folder's safetensors are to be loaded.
    """
    fields = Fields.from_file(folder / "config.json")
    read_architecture(fields)
    if "quantization_config" in fields:
        read_method(fields.section("quantization_config"))
    if has_weights:
        check_files(folder)
    if any(isinstance(fields.raw(part), dict) for part in ("text_config", "encoder", "decoder")):
        return None
    has = structure(fields.values)
    check_shared(fields, has)
    if has_weights and "quantization_config" not in fields:
        check_shapes(folder, fields, has)
    return _max_length(fields)


def _max_length(fields: Fields) -> int | None:
    """Returns the length; None where RoPE may stretch it."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.section(name)
        if (rope.raw("rope_type") or rope.raw("type") or "default") not in UNSTRETCHED:
            return None
        if any(isinstance(rope.raw(one), dict) for one in rope.names()):  # layers differ
            return None
    return fields.integer("max_position_embeddings", 0) or None
