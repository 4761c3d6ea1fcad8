"""What config.json and weights' headers tell without torch, whose import takes seconds. Loading checks all again."""

from pathlib import Path

from tandem.workers.checkpoint.architectures import read_architecture
from tandem.workers.checkpoint.errors import InvalidWeights, ModelError, UnsupportedFeature
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.checkpoint.least_bytes import read_headers
from tandem.workers.checkpoint.quantizations import ACCEPTED, METHODS

EMBEDDING = "model.embed_tokens.weight"
UNSTRETCHED = ("default", "llama3", "longrope")  # types of RoPE whose length is max_position_embeddings


def first_checks(folder: Path, *, has_weights: bool) -> int | None:
    """The longest sequence that the model takes, where that is plain to see. Raises ModelError.

    has_weights: whether the folder's safetensors are to be loaded.
    """
    fields = Fields.from_file(folder / "config.json")
    read_architecture(fields)
    _check_quantization(fields)
    if any(isinstance(fields.raw(part), dict) for part in ("text_config", "encoder", "decoder")):
        return None
    if has_weights and "quantization_config" not in fields:
        _check_embedding(folder, fields)
    return _max_length(fields)


def _check_quantization(fields: Fields) -> None:
    if "quantization_config" not in fields:
        return
    section = fields.section("quantization_config")
    method = section.raw("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedFeature(
            f"{section.source}: quant_method is {SHOWN.repr(method)}; it must be "
            f"{' or '.join(map(repr, METHODS))}: take another checkpoint, or one without quantization"
        )
    for name, value in ACCEPTED.get(method, {}).items():
        found = section.raw(name)
        if type(found) is not type(value) or found != value:
            raise UnsupportedFeature(
                f"{section.source}: {name} is {SHOWN.repr(found)}; it must be {value!r} where quant_method is "
                f"{method!r}"
            )


def _check_embedding(folder: Path, fields: Fields) -> None:
    """Its shape shows whether config.json belongs to these weights."""
    asked = [fields.integer("vocab_size", 0), fields.integer("hidden_size", 0)]
    wrong = [(path, shape) for path, shape in _embeddings(folder) if all(asked) and shape != asked]
    if wrong:
        path, shape = wrong[0]
        raise InvalidWeights(f"{path}: tensor {EMBEDDING} has shape {SHOWN.repr(shape)}; config.json asks for {asked}")


def _embeddings(folder: Path) -> list[tuple[Path, object]]:
    """Files that have it, with its shape. None where one cannot be read, which loading has an error for."""
    try:
        return [(path, header[EMBEDDING]["shape"]) for path, header in read_headers(folder) if EMBEDDING in header]
    except (ModelError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _max_length(fields: Fields) -> int | None:
    """None where RoPE may stretch max_position_embeddings."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.section(name)
        if rope.text("rope_type", rope.text("type", "default")) not in UNSTRETCHED:
            return None
        if any(isinstance(rope.raw(one), dict) for one in rope.names()):  # layers differ
            return None
    return fields.integer("max_position_embeddings", 0) or None
