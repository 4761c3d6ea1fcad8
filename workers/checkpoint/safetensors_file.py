"""Reading of one safetensors file straight into tensors that exist already, in parts that threads may read at once.

Plain reads and not a mapping: mapped pages count as resident, and with the parameters would make twice the checkpoint.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidWeights
from tandem.workers.checkpoint.files import POINTER, check_fetched, open_regular

HEADER_LIMIT = 32 << 20  # bytes: 100,000 tensors take 12 MB
MAX_TENSORS = 1 << 18  # of a file
MAX_DIMENSIONS = 8
PART_BYTES = 2 << 20  # small, for each thread that reads may have one staged
STORED_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
}
ITEM_BYTES = {
    **{name: dtype.itemsize for name, dtype in STORED_DTYPES.items()},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class StoredTensor:
    """The position of one tensor: begin and num_bytes in bytes, begin from the start of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Slice:
    """A stored tensor that fills `target`, or a slice of it along one dimension."""

    target: Tensor  # contiguous, any device; of another dtype than the stored one it converts
    dim: int = 0  # 0; or 1, of a tensor of two dimensions; or one after dimensions of size 1
    begin: int = 0  # of the slice
    extent: int | None = None  # of the stored tensor in dim; None: the target's

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = list(self.target.shape)
        if self.extent is not None:
            shape[self.dim] = self.extent
        return tuple(shape)


class SafetensorsFile:
    """One open file; use as a context manager. Opening checks the header and that the file is as long as it says."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointMissing when the file is not there, NotFetched when it is a Git LFS pointer, InvalidWeights
        when it is cut short or malformed."""
        self.path = path
        try:
            self._file: BinaryIO = open_regular(path)
        except FileNotFoundError:
            raise CheckpointMissing(f"weights {path} are not there") from None
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

    def parts(self, name: str, one: Slice, dtype: torch.dtype | None = None) -> list["TensorPart"]:
        """The parts that fill the target of a slice of the tensor. dtype: as stored; None: dtype_of(), which raises
        InvalidWeights."""
        dtype, begin, target = dtype or self.dtype_of(name), self.tensors[name].begin, one.target
        pitch, columns = dtype.itemsize, None
        if one.dim == 1 and one.extent is not None:
            pitch, columns = one.extent * dtype.itemsize, (one.begin, one.extent)
        else:
            begin += one.begin * math.prod(target.shape[one.dim + 1 :]) * dtype.itemsize
            target = target.view(-1)
        count = max(1, PART_BYTES // pitch)
        return [
            TensorPart(self, dtype, begin + index * count * pitch, part, columns)
            for index, part in enumerate(target.split(count))
        ]

    def read(self, offset: int, target: Tensor) -> None:
        """Fills `target` (flat, on the CPU) with the bytes that stand there. From any thread."""
        view = target.view(torch.uint8).numpy().data
        while len(view):
            count = os.preadv(self._file.fileno(), [view], offset)
            if not count:
                raise InvalidWeights(f"{self.path} ended while it was read; it must not change under a running load")
            view, offset = view[count:], offset + count

    def _read_header(self) -> dict[str, StoredTensor]:
        size = self.path.stat().st_size
        check_fetched(self.path, os.pread(self._file.fileno(), len(POINTER), 0))
        prefix = self._file.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) == 8 and HEADER_LIMIT < header_bytes <= size - 8:
            raise InvalidWeights(
                f"{self.path} has a header of {header_bytes} bytes; it may have at most {HEADER_LIMIT}"
            )
        if len(prefix) < 8 or header_bytes > size - 8:
            raise InvalidWeights(
                f"{self.path} is cut short or no safetensors file: {size} bytes, and a header of {header_bytes}"
            )
        try:
            header = json.loads(self._file.read(header_bytes))
            header.pop("__metadata__", None)
            if len(header) > MAX_TENSORS:
                raise ValueError(f"it has {len(header)} tensors; it may have at most {MAX_TENSORS}")
            tensors = {name: _stored_tensor(entry, 8 + header_bytes) for name, entry in header.items()}
        except RecursionError:
            raise InvalidWeights(f"{self.path} has no readable safetensors header: it is nested too deeply") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidWeights(f"{self.path} has no readable safetensors header: {error!s:.300}") from None
        self._check_spans(tensors, size)
        return tensors

    def _check_spans(self, tensors: dict[str, StoredTensor], size: int) -> None:
        """Checks that no tensor ends after the file, and no two share bytes."""
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
            if tensor.num_bytes and tensor.begin < end:
                raise InvalidWeights(
                    f"{self.path}: tensor {name} begins at byte {tensor.begin}, within tensor {before}; "
                    "each must have bytes of its own"
                )
            end, before = tensor.begin + tensor.num_bytes, name
        if end > size:
            raise InvalidWeights(f"{self.path} is cut short: {size} bytes, but its tensors end at byte {end}")


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Consecutive elements of a stored tensor, or some columns of consecutive rows."""

    file: SafetensorsFile
    dtype: torch.dtype  # as stored
    offset: int  # in the file, in bytes
    target: Tensor  # flat; with columns [rows, n]
    columns: tuple[int, int] | None = None  # the first of them, and how many a stored row has

    @property
    def location(self) -> tuple[Path, int]:
        """File and offset."""
        return self.file.path, self.offset

    def read(self, staging: Tensor) -> int:
        """Reads the part; any thread may call it that has new_staging() to itself. Returns the bytes that were
        filled."""
        target = self.target
        if target.dtype == self.dtype and target.device.type == "cpu" and self.columns is None:
            self.file.read(self.offset, target)
        else:
            begin, width = self.columns or (0, 1)
            elements = target.numel() if self.columns is None else target.shape[0] * width
            read = staging[: elements * self.dtype.itemsize].view(self.dtype)
            self.file.read(self.offset, read)
            if self.columns is not None:
                read = read.view(-1, width).narrow(1, begin, target.shape[1])
            with torch.inference_mode(target.is_inference()):  # a mode of the thread that made it, not of this one
                target.copy_(read)
        return target.nbytes


def new_staging(device: torch.device | str) -> Tensor:
    """Allocates room for any part that goes to that device."""
    return torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")


def _stored_tensor(entry: dict[str, object], data_begin: int) -> StoredTensor:
    """One entry of the header; ValueError, KeyError or TypeError when it is malformed."""
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"entry {entry!r}")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a shape of {len(shape)} dimensions; it may have at most {MAX_DIMENSIONS}")
    begin, end = offsets
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)) or end < begin:
        raise ValueError(f"entry {entry!r}")
    size = ITEM_BYTES.get(name)
    if size is not None and end - begin != math.prod(shape) * size:
        raise ValueError(f"{end - begin} bytes for shape {shape} of {name}")
    return StoredTensor(name, tuple(shape), data_begin + begin, end - begin)
