"""The experts of a layer in 4 bits: X_blocks U8 [E, R, G, 16], and X_scales U8 [E, R, G]. The weight is [E, 32·G, R].

32 numbers share an exponent of two, stored plus 127. The exponent 255 is none, as the format has it: its numbers become
NaN or infinity.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import Slice
from tandem.workers.checkpoint.stored import PART_NUMBERS, Plain, StoredWeight, WeightPart, fill, read_bytes
from tandem.workers.kernels.packed_linear import PackedLinear
from tandem.workers.kernels.torch.packed import dequantize
from tandem.workers.weights.allocator import DENSE, Form
from tandem.workers.weights.formats.format import Format, Method, Quantization, read_modules
from tandem.workers.weights.packed import PackedForm

BLOCKS, EXPONENTS = "_blocks", "_scales"
GROUP = 32  # columns that share an exponent


@dataclass(frozen=True, eq=False)
class Mxfp4Weight:
    """All experts of a layer in 4 bits."""

    blocks: Plain
    exponents: Plain

    @classmethod
    def of(cls, blocks: Plain, exponents: Plain) -> "Mxfp4Weight":
        """Raises InvalidWeights where their shapes or types do not fit each other."""
        shape, dtypes = blocks.shape, {one.file.tensors[one.name].dtype_name for one in (blocks, exponents)}
        if len(shape) != 4 or shape[3] != 16 or exponents.shape != shape[:3] or dtypes != {"U8"}:
            raise InvalidWeights(
                f"{blocks.path}: tensors {blocks.name} and {exponents.name} are {', '.join(sorted(dtypes))} of shapes "
                f"{list(shape)} and {list(exponents.shape)}; they must be U8 of [E, R, G, 16] and [E, R, G]"
            )
        return cls(blocks, exponents)

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.blocks.shape
        return experts, groups * 32, rows

    def kept(self) -> Mapping[str, StoredWeight]:
        experts, rows, groups, _ = self.blocks.shape
        return {
            "numbers": Bytes(self.blocks, (experts, rows, groups * 16)),
            "scales": Bytes(self.exponents, (experts, rows, groups)),
        }

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        count = max(1, PART_NUMBERS // max(1, self.shape[1]))
        return [
            Mxfp4Part(self, one.begin + expert, index * count, target)
            for expert, weight in enumerate(one.target)
            for index, target in enumerate(weight.split(count, dim=1))
        ]


@dataclass(frozen=True, eq=False)
class Bytes:
    """A tensor seen as bytes, in a shape of as many elements."""

    stored: Plain
    shape: tuple[int, ...]

    @property
    def path(self) -> Path:
        return self.stored.path

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        return self.stored.file.parts(self.stored.name, one, torch.uint8)

    def kept(self) -> Mapping[str, StoredWeight]:
        return {}


@dataclass(frozen=True, eq=False)
class Mxfp4Part:
    """Consecutive rows of an expert, which are columns of the target."""

    weight: Mxfp4Weight
    expert: int
    first: int
    target: Tensor  # [32·G, rows]

    @property
    def location(self) -> tuple[Path, int]:
        return self.weight.path, self._offset(self.weight.blocks)

    def read(self, staging: Tensor) -> int:
        rows, groups = self.target.shape[1], self.weight.blocks.shape[2]
        blocks, exponents = self.weight.blocks, self.weight.exponents
        pairs = read_bytes(blocks.file, self._offset(blocks), rows * groups * 16).view(rows, -1)
        scales = read_bytes(exponents.file, self._offset(exponents), rows * groups).view(rows, -1)
        fill(self.target, dequantize(PackedLinear(pairs, scales, None, None, None), 0, rows).T)
        return self.target.nbytes

    def _offset(self, stored: Plain) -> int:
        _, rows, *row = stored.shape
        begin = stored.file.tensors[stored.name].begin
        return begin + (self.expert * rows + self.first) * math.prod(row)


def _find(plain: Mapping[str, Plain], quantization: Quantization) -> tuple[dict[str, Mxfp4Weight], set[str]]:
    found, used = dict[str, Mxfp4Weight](), set[str]()
    for name, one in plain.items():
        if not name.endswith(BLOCKS):
            continue
        weight = name.removesuffix(BLOCKS)
        exponents = plain.get(weight + EXPONENTS)
        if exponents is None:
            raise InvalidWeights(f"{one.path}: tensor {name} must have {weight + EXPONENTS} beside it")
        found[weight] = Mxfp4Weight.of(one, exponents)
        used |= {name, exponents.name}
    return found, used


def mxfp4_form(parts: Sequence[StoredWeight], columns: int, kind: type[StoredWeight] = Mxfp4Weight) -> Form:
    """Returns the packed form, as the weights are stored."""
    return PackedForm(GROUP, exponents=True) if parts and all(isinstance(part, kind) for part in parts) else DENSE


MXFP4 = Format(_find, mxfp4_form, lambda quantization: PackedForm(GROUP, exponents=True))


def _read(section: Fields, served: str) -> Quantization:
    return Quantization("mxfp4", unquantized=read_modules(section, "modules_to_not_convert"))


MXFP4_METHOD = Method("mxfp4", _read)
