"""Reads the tensors in a checkpoint's headers, and the least memory that they take. It needs no torch, so it comes
first."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.workers.checkpoint.errors import InvalidWeights, ModelError
from tandem.workers.checkpoint.fields import MAX_JSON_BYTES
from tandem.workers.checkpoint.files import POINTER, check_fetched, open_regular
from tandem.workers.checkpoint.weight_files import weight_files

WIDE = ("F32", "F64")  # which a model of 16 bits has in two bytes


def least_weight_bytes(folder: Path, *, in_16_bits: bool) -> int:
    """Bytes of the weights where nothing is dequantized. 0 for what cannot be read, which loading has an error for."""
    try:
        return sum(_bytes_of(header, in_16_bits=in_16_bits) for _, _, header in read_headers(folder))
    except (ModelError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def read_headers(folder: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Each file, the byte where its data begins, and its tensors by name: dtype, shape and data_offsets, unchecked. For
    what cannot be read it raises ModelError, OSError, ValueError, AttributeError and RecursionError."""
    for path in weight_files(folder):
        with open_regular(path) as file:
            first = file.read(len(POINTER))
            check_fetched(path, first)
            size, of_file = int.from_bytes(first[:8], "little"), path.stat().st_size
            if size > of_file - 8:
                raise InvalidWeights(
                    f"{path} is cut short or no safetensors file: {of_file} bytes, and a header of {size}"
                )
            file.seek(8)
            header = json.loads(file.read(min(size, MAX_JSON_BYTES)))
        header.pop("__metadata__", None)
        yield path, 8 + size, header


def _bytes_of(header: Mapping[str, Any], *, in_16_bits: bool) -> int:
    total = 0
    for tensor in header.values():
        begin, end = tensor["data_offsets"]
        narrowed = in_16_bits and tensor["dtype"] in WIDE
        total += 2 * math.prod(tensor["shape"]) if narrowed else end - begin
    return total
