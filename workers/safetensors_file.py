"""Reading of one safetensors file straight into tensors that exist already.

Plain reads and not a mapping: mapped pages count as resident, and with the parameters would make twice the checkpoint.
Format: https://github.com/huggingface/safetensors#format
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tandem.workers.models.errors import CheckpointMissing, InvalidWeights

HEADER_LIMIT = 100_000_000  # bytes, the format's own
STAGING_BYTES = 16 << 20
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor stands: begin and num_bytes in bytes, begin from the start of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class SafetensorsFile:
    """One open file; use as a context manager. Opening checks the header and that the file is as long as it says."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointMissing when the file is not there, InvalidWeights when it is cut short or malformed."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointMissing(f"weights {path} cannot be opened: {error.strerror}") from None
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises InvalidWeights when the element type is none of STORED_DTYPES."""
        stored = self.tensors[name]
        if stored.dtype_name not in STORED_DTYPES:
            raise InvalidWeights(
                f"{self.path}: tensor {name} is stored as {stored.dtype_name}; "
                f"it must be one of {', '.join(STORED_DTYPES)}"
            )
        return STORED_DTYPES[stored.dtype_name]

    def read_into(self, name: str, place: Tensor) -> None:
        """Fills `place` (contiguous, of the stored shape, any device) and converts to its dtype where that differs.

        Raises InvalidWeights as dtype_of().
        """
        dtype = self.dtype_of(name)
        self._file.seek(self.tensors[name].begin)
        flat = place.view(-1)
        if dtype == place.dtype and place.device.type == "cpu":
            self._read(flat.view(torch.uint8))
            return
        step = STAGING_BYTES // dtype.itemsize
        staging = torch.empty(min(step, flat.numel()), dtype=dtype)
        for begin in range(0, flat.numel(), step):
            part = staging[: min(step, flat.numel() - begin)]
            self._read(part.view(torch.uint8))
            flat[begin : begin + part.numel()].copy_(part)

    def _read(self, target: Tensor) -> None:
        view = target.numpy().data
        while len(view):
            count = self._file.readinto(view)  # type: ignore[attr-defined]  # raw files have it, BinaryIO does not say
            if not count:
                raise InvalidWeights(f"{self.path} ended while it was read; it must not change under a running load")
            view = view[count:]

    def _read_header(self) -> dict[str, StoredTensor]:
        size = self.path.stat().st_size
        prefix = self._file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(HEADER_LIMIT, size - 8):
            raise InvalidWeights(
                f"{self.path} is cut short or no safetensors file: {size} bytes, and a header of {header_bytes}"
            )
        try:
            header = json.loads(self._file.read(header_bytes))
            header.pop("__metadata__", None)
            tensors = {name: _stored_tensor(entry, 8 + header_bytes) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidWeights(f"{self.path} has no readable safetensors header: {error}") from None
        end = max((tensor.begin + tensor.num_bytes for tensor in tensors.values()), default=0)
        if end > size:
            raise InvalidWeights(f"{self.path} is cut short: {size} bytes, but its tensors end at byte {end}")
        return tensors


def _stored_tensor(entry: dict[str, object], data_begin: int) -> StoredTensor:
    """One entry of the header; ValueError, KeyError or TypeError when it is malformed."""
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"entry {entry!r}")
    begin, end = offsets
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or end < begin:
        raise ValueError(f"entry {entry!r}")
    dtype = STORED_DTYPES.get(name)
    count = 1
    for extent in shape:
        count *= extent
    if dtype is not None and end - begin != count * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {name}")
    return StoredTensor(name, tuple(shape), data_begin + begin, end - begin)
