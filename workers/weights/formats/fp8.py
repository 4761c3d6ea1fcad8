"""Weights in 8 bits: X.weight F8_E4M3 [R, C], and its scales X.weight_scale_inv, X.weight_scale or X.scale.

A scale is of the tensor [1], of a row [R, 1], or of a block of rows and columns. weight = number · scale. Memory keeps
them so, as tandem.workers.weights.fp8 says, with a scale for each row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice
from tandem.workers.checkpoint.stored import PART_NUMBERS, Plain, StoredWeight, WeightPart, fill, read_bytes
from tandem.workers.weights.allocator import DENSE, Form
from tandem.workers.weights.formats.format import Format, Method, Quantization, accept, read_block, read_modules
from tandem.workers.weights.fp8 import Fp8Form

E4M3 = "F8_E4M3"
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # torch converts slowly
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu}


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A matrix in 8 bits. Each part reads the scales of its rows."""

    file: SafetensorsFile
    name: str
    scales: Plain
    block: tuple[int, int]  # rows and columns that share a scale
    grid: tuple[int, int]  # the shape of the scales

    @classmethod
    def of(cls, file: SafetensorsFile, name: str, scales: Plain, quantization: Quantization) -> "Fp8Weight":
        """Raises InvalidWeights where the scales fit neither tensor, rows nor blocks."""
        shape, found = file.tensors[name].shape, scales.shape
        dtype = scales.file.tensors[scales.name].dtype_name
        if len(shape) != 2 or dtype not in SCALE_DTYPES:
            raise InvalidWeights(
                f"{file.path}: tensor {name} has shape {list(shape)}, and {scales.name} is stored as {dtype}; a matrix "
                f"in 8 bits must have 2 dimensions, and its scales be one of {', '.join(SCALE_DTYPES)}"
            )
        rows, columns = shape
        if math.prod(found) == 1:
            return cls(file, name, scales, (max(1, rows), max(1, columns)), (1, 1))
        if found in ((rows,), (rows, 1)):
            return cls(file, name, scales, (1, max(1, columns)), (rows, 1))
        block = quantization.block
        if block is not None and found == (grid := (-(-rows // block[0]), -(-columns // block[1]))):
            return cls(file, name, scales, block, grid)
        blocks = "quantization_config names no block" if block is None else f"or one for each block of {list(block)}"
        raise InvalidWeights(
            f"{scales.path}: tensor {scales.name} has shape {list(found)} for a weight of {list(shape)}; it must "
            f"be 1 scale, {[rows, 1]}, {blocks}"
        )

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    @property
    def row_bytes(self) -> int:
        return self.shape[1]

    def numbers(self, first: int, count: int) -> Tensor:
        """Returns the numbers of rows, not scaled yet, float32 [count, C]."""
        return VALUES.index_select(0, self.stored_rows(first, count).int()).view(count, -1)

    def scales_of(self, first: int, count: int) -> Tensor:
        """Returns the scales of rows, float32 [count, blocks side by side]."""
        stored = self.scales.file.tensors[self.scales.name]
        dtype, blocks = SCALE_DTYPES[stored.dtype_name], (first + torch.arange(count)) // self.block[0]
        row, row_bytes = first // self.block[0], self.grid[1] * dtype.itemsize
        rows = -(-(first + count) // self.block[0]) - row
        scales = read_bytes(self.scales.file, stored.begin + row * row_bytes, rows * row_bytes)
        return scales.view(dtype).float().view(rows, self.grid[1])[blocks - row]

    def stored_rows(self, first: int, count: int) -> Tensor:
        """Reads rows as uint8 [count · row_bytes]."""
        begin = self.file.tensors[self.name].begin
        return read_bytes(self.file, begin + first * self.row_bytes, count * self.row_bytes)

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        count = max(1, PART_NUMBERS // max(1, self.shape[1]))
        first, column = (0, one.begin) if one.dim == 1 else (one.begin, 0)
        return [
            Fp8Part(self, first + index * count, column, target) for index, target in enumerate(one.target.split(count))
        ]

    @property
    def group(self) -> int | None:
        """The columns that share a scale of a row; None: all."""
        return None if self.grid[1] == 1 else self.block[1]

    def kept(self) -> Mapping[str, StoredWeight]:
        return {"weight": Fp8Numbers(self), "weight_scale": Fp8Scales(self)}


@dataclass(frozen=True, eq=False)
class Fp8Numbers:
    """The numbers as they are stored."""

    weight: Fp8Weight

    @property
    def path(self) -> Path:
        return self.weight.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        return self.weight.file.parts(self.weight.name, one, torch.float8_e4m3fn)

    def kept(self) -> Mapping[str, StoredWeight]:
        return {}


@dataclass(frozen=True, eq=False)
class Fp8Scales:
    """The scales of each row, float32."""

    weight: Fp8Weight

    @property
    def path(self) -> Path:
        return self.weight.scales.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape[0], self.weight.grid[1]

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        count = max(1, PART_NUMBERS // self.weight.grid[1])
        first, group = (0, one.begin) if one.dim == 1 else (one.begin, 0)
        return [
            Fp8ScalesPart(self.weight, first + index * count, group, target)
            for index, target in enumerate(one.target.split(count))
        ]

    def kept(self) -> Mapping[str, StoredWeight]:
        return {}


@dataclass(frozen=True, eq=False)
class Fp8ScalesPart:
    """The scales of consecutive rows, or of some groups of their columns."""

    weight: Fp8Weight
    first: int  # of the rows
    group: int
    target: Tensor  # [rows, groups]

    @property
    def location(self) -> tuple[Path, int]:
        scales = self.weight.scales
        return scales.path, scales.file.tensors[scales.name].begin + self.first // self.weight.block[0]

    def read(self, staging: Tensor) -> int:
        rows, groups = self.target.shape
        fill(self.target, self.weight.scales_of(self.first, rows).narrow(1, self.group, groups))
        return self.target.nbytes


@dataclass(frozen=True, eq=False)
class Fp8Part:
    """Consecutive rows, or some of their columns."""

    weight: Fp8Weight
    first: int  # of the rows
    column: int
    target: Tensor  # [rows, columns]

    @property
    def location(self) -> tuple[Path, int]:
        weight = self.weight
        return weight.path, weight.file.tensors[weight.name].begin + self.first * weight.row_bytes

    def read(self, staging: Tensor) -> int:
        weight, rows = self.weight, self.target.shape[0]
        values = weight.numbers(self.first, rows)
        of_rows = weight.scales_of(self.first, rows)
        width = weight.block[1]
        whole = weight.shape[1] // width  # blocks that are not cut off
        values[:, : whole * width].unflatten(1, (whole, width)).mul_(of_rows[:, :whole, None])
        values[:, whole * width :].mul_(of_rows[:, whole:])
        fill(self.target, values.narrow(1, self.column, self.target.shape[1]))
        return self.target.nbytes


def _find(plain: Mapping[str, Plain], quantization: Quantization) -> tuple[dict[str, Fp8Weight], set[str]]:
    found, used = dict[str, Fp8Weight](), set[str]()
    for name, one in plain.items():
        if one.file.tensors[name].dtype_name != E4M3:
            continue
        names = _scale_names(name)
        scales = [plain[scale] for scale in names if scale in plain]
        if len(scales) != 1:
            raise InvalidWeights(
                f"{one.path}: tensor {name} is stored as {E4M3}; it must have {' or '.join(names)} beside it"
            )
        found[name] = Fp8Weight.of(one.file, name, scales[0], quantization)
        used.add(scales[0].name)
    return found, used


def _scale_names(name: str) -> tuple[str, ...]:
    published = (name.removesuffix("weight") + "scale",) if name.endswith(".weight") else ()
    return (f"{name}_scale_inv", f"{name}_scale", *published)


def _form(parts: Sequence[StoredWeight], columns: int) -> Form:
    """Returns the form of FP8 where all parts have groups of as many columns. Else reading dequantizes them."""
    stored = [part for part in parts if type(part) is Fp8Weight]
    groups = {part.group for part in stored}
    if len(stored) < len(parts) or len(groups) != 1:
        return DENSE
    (group,), whole = groups, stored[0].shape[1]
    if group is not None and columns != whole and columns % group:
        fit = [size for size in range(1, whole // group + 1) if whole % (size * group) == 0]
        raise InvalidWeights(
            f"{stored[0].path}: tensor {stored[0].name} has scales of {group} columns each, of which a rank would have "
            f"{columns} of {whole}; {', '.join(map(str, fit)) or 1} ranks can divide them"
        )
    return Fp8Form(group)


def _dummy_form(quantization: Quantization) -> Form:
    return Fp8Form(None if quantization.block is None else quantization.block[1])


def _read(section: Fields, served: str) -> Quantization:
    accept(section, "fmt", (None, "e4m3"), served)
    block, unquantized = read_block(section, "weight_block_size"), read_modules(section, "modules_to_not_convert")
    return Quantization("fp8", block, unquantized)


FP8 = Format(_find, _form, _dummy_form)
FP8_METHOD = Method("fp8", _read)
