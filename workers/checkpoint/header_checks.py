"""Checks the weights' headers without torch, for files that are missing or cut short, and for weights of another model.

Loading checks all again, by the parameters that it fills.
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidWeights, ModelError
from tandem.workers.checkpoint.fields import SHOWN, Fields
from tandem.workers.checkpoint.least_bytes import read_headers
from tandem.workers.checkpoint.weight_files import weight_files

EMBEDDING = "model.embed_tokens.weight"
LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.*)")
Shapes = Mapping[str, object]


def check_files(folder: Path) -> None:
    """Whether they are there and whole. Raises CheckpointMissing, InvalidConfig and InvalidWeights."""
    weight_files(folder)
    for path, end, _ in _read(folder):
        size = path.stat().st_size
        if size < end:
            raise InvalidWeights(f"{path} is cut short: {size} bytes, but its tensors end at byte {end}")


def check_shapes(folder: Path, fields: Fields, has: AbstractSet[str]) -> None:
    """Whether config.json belongs to the weights, which are not quantized. has: the model's structure(). Raises
    InvalidWeights."""
    wanted, found = fields.integer("num_hidden_layers", 0), 0
    for path, _, shapes in _read(folder):
        for name, asked in _asked(fields, has, shapes):
            if shapes[name] != asked:
                raise InvalidWeights(
                    f"{path}: tensor {name} has shape {SHOWN.repr(shapes[name])}; config.json asks for {asked}"
                )
        numbers = (LAYER.match(name) for name in shapes)
        found = max([found, *(int(number[1]) + 1 for number in numbers if number)])
    if found and wanted and (found < wanted or (found > wanted and not has)):
        raise InvalidWeights(f"{folder}: num_hidden_layers is {wanted} in config.json; the weights have {found} layers")


def _asked(fields: Fields, has: AbstractSet[str], shapes: Shapes) -> Iterator[tuple[str, list[int]]]:
    """The shapes that config.json asks for, of tensors that are there: of the embedding, and of all layers where they
    have nothing but attention and a gated feed-forward."""
    hidden, vocabulary = fields.integer("hidden_size", 0), fields.integer("vocab_size", 0)
    if EMBEDDING in shapes and hidden and vocabulary:
        yield EMBEDDING, [vocabulary, hidden]
    if has or not hidden:
        return
    rows = {"mlp.gate_proj.weight": fields.integer("intermediate_size", 0)}
    rows["mlp.up_proj.weight"] = rows["mlp.gate_proj.weight"]
    if "head_dim" in fields:
        head_dim = fields.integer("head_dim")
        rows["self_attn.q_proj.weight"] = fields.integer("num_attention_heads", 0) * head_dim
        kv_rows = fields.integer("num_key_value_heads", 0) * head_dim
        rows |= dict.fromkeys(("self_attn.k_proj.weight", "self_attn.v_proj.weight"), kv_rows)
    for name in shapes:
        layer = LAYER.match(name)
        count = rows.get(layer[2], 0) if layer else 0
        if count:
            yield name, [count, hidden]


def _read(folder: Path) -> list[tuple[Path, int, Shapes]]:
    """Each file, where its last tensor ends, and the shapes of its tensors; none where a header is malformed, for which
    loading has an error. Raises CheckpointMissing and InvalidWeights."""
    try:
        return [
            (
                path,
                begin + max((one["data_offsets"][1] for one in header.values()), default=0),
                {name: one["shape"] for name, one in header.items()},
            )
            for path, begin, header in read_headers(folder)
        ]
    except (CheckpointMissing, InvalidWeights):
        raise
    except (ModelError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return []
