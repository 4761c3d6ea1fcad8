"""What a checkpoint's headers tell of the memory that LoRA adapters take, without torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from tandem.workers.checkpoint.errors import ModelError
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.least_bytes import read_headers

PRODUCT = re.compile(
    r"(?:model\.|language_model\.)*layers\.(\d{1,6})\.(?:self_attn|mlp|feed_forward)\."
    r"(q|k|v|qkv|o|gate|up|gate_up|down)_proj\.weight"
)
DIVIDED_BY_COLUMNS = ("o", "down")  # among ranks; others are divided by rows


def least_adapter_bytes(folder: Path, dtype: str, max_rank: int, ranks: int) -> int:
    """The least bytes of one adapter of rank max_rank on each rank of a worker. dtype: as in the configuration. 0 for
    what cannot be read, which loading has an error for.

    It counts products that every family adapts: those of attention and of dense feed-forwards.
    """
    try:
        fields = Fields.from_file(folder / "config.json")
        text = fields.section("text_config") if "text_config" in fields else fields
        layers, shares = text.integer("num_hidden_layers", 0), bool(text.raw("num_kv_shared_layers"))
        numbers = sum(
            _numbers(match[2], header[name]["shape"], max_rank, ranks)
            for _, _, header in read_headers(folder)
            for name in header
            if (match := PRODUCT.fullmatch(name)) and int(match[1]) < layers and not (shares and match[2] in "kv")
        )
    except (ModelError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0
    stored = text.raw("dtype") or text.raw("torch_dtype") or fields.raw("dtype") or fields.raw("torch_dtype")
    return numbers * (4 if dtype == "float32" or (dtype, stored) == ("auto", "float32") else 2)


def _numbers(product: str, shape: Sequence[int], max_rank: int, ranks: int) -> int:
    """Numbers of a rank's A [max_rank, columns] and B [rows, max_rank]. Raises ValueError."""
    rows, columns = shape
    if product in DIVIDED_BY_COLUMNS:
        return max_rank * (rows + columns // ranks)
    return max_rank * (rows // ranks + columns)
