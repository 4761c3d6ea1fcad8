"""What config.json and weights' headers tell without torch, whose import takes seconds. Loading checks all again."""

import re
from pathlib import Path

from tandem.workers.checkpoint.architectures import read_architecture
from tandem.workers.checkpoint.errors import InvalidWeights, ModelError, NotFetched
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.checkpoint.least_bytes import read_headers
from tandem.workers.checkpoint.quantizations import read_method

EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
UNSTRETCHED = ("default", "llama3", "longrope")  # types of RoPE whose length is max_position_embeddings


def first_checks(folder: Path, *, has_weights: bool) -> int | None:
    """The longest sequence that the model takes, where that is plain to see. Raises ModelError.

    has_weights: whether the folder's safetensors are to be loaded.
    """
    fields = Fields.from_file(folder / "config.json")
    read_architecture(fields)
    if "quantization_config" in fields:
        read_method(fields.section("quantization_config"))
    if any(isinstance(fields.raw(part), dict) for part in ("text_config", "encoder", "decoder")):
        return None
    if has_weights and "quantization_config" not in fields:
        _check_headers(folder, fields)
    return _max_length(fields)


def _check_headers(folder: Path, fields: Fields) -> None:
    """Whether files are whole, and whether config.json belongs to them."""
    asked = [fields.integer("vocab_size", 0), fields.integer("hidden_size", 0)]
    wanted, found = fields.integer("num_hidden_layers", 0), 0
    for path, end, tensors in _read(folder):
        if path.stat().st_size < end:
            raise InvalidWeights(f"{path} is cut short: {path.stat().st_size} bytes, but its tensors end at byte {end}")
        shape = tensors.get(EMBEDDING, asked)
        if all(asked) and shape != asked:
            raise InvalidWeights(
                f"{path}: tensor {EMBEDDING} has shape {SHOWN.repr(shape)}; config.json asks for {asked}"
            )
        numbers = (LAYER.match(name) for name in tensors)
        found = max([found, *(int(number[1]) + 1 for number in numbers if number)])
    if 0 < found < wanted:
        raise InvalidWeights(f"{folder}: num_hidden_layers is {wanted} in config.json; the weights have {found} layers")


def _read(folder: Path) -> list[tuple[Path, int, dict[str, object]]]:
    """Each file, where its last tensor ends, and the shapes of its tensors. None where one cannot be read, for which
    loading has an error. Raises NotFetched."""
    try:
        return [
            (
                path,
                begin + max((one["data_offsets"][1] for one in header.values()), default=0),
                {name: one["shape"] for name, one in header.items()},
            )
            for path, begin, header in read_headers(folder)
        ]
    except NotFetched:
        raise
    except (ModelError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
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
