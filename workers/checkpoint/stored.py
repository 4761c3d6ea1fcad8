"""A weight of a checkpoint, and the parts in which threads read it.

A quantized weight is dequantized part by part, straight into the parameters. In addition, loading takes at most
MAX_PART_BYTES for each thread that reads, however large a tensor is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice

PART_NUMBERS = 1 << 19  # that a thread dequantizes at once
MAX_PART_BYTES = 8 << 20  # of all tensors that it makes meanwhile


class WeightPart(Protocol):
    """A part of one weight, which a thread reads on its own."""

    @property
    def location(self) -> tuple[Path, int]:
        """File and offset, as a disk likes to read."""
        ...

    def read(self, staging: Tensor) -> int:
        """See TensorPart.read."""
        ...


class StoredWeight(Protocol):
    """One weight, by the name and in the shape that it has where nothing is quantized."""

    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        """Returns the parts that fill the target of a slice, dequantized. Raises InvalidWeights."""
        ...

    def kept(self) -> Mapping[str, "StoredWeight"]:
        """Returns the tensors of a weight that memory keeps in the form of its format: by kind, see Weight.tensors.
        Empty: memory keeps it dense."""
        ...


@dataclass(frozen=True, eq=False)
class Plain:
    """A tensor as it is stored."""

    file: SafetensorsFile
    name: str

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        return self.file.parts(self.name, one)

    def kept(self) -> Mapping[str, StoredWeight]:
        return {}


def read_bytes(file: SafetensorsFile, offset: int, count: int) -> Tensor:
    """Reads uint8 [count], any bytes of a file."""
    target = torch.empty(count, dtype=torch.uint8)
    file.read(offset, target)
    return target


def fill(target: Tensor, values: Tensor) -> None:
    with torch.inference_mode(target.is_inference()):  # a mode of the thread that made it, not of this one
        target.copy_(values)
