"""Integers of 4 bits in groups of columns, whichever way files have them: what is stored of a weight, and its parts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import Slice
from tandem.workers.checkpoint.stored import PART_NUMBERS, Plain, StoredWeight, WeightPart, fill, read_bytes
from tandem.workers.kernels.packed_linear import PackedLinear
from tandem.workers.kernels.torch.packed import dequantize
from tandem.workers.weights.allocator import DENSE, Form
from tandem.workers.weights.formats.format import MAX_BLOCK, Quantization
from tandem.workers.weights.packed import PackedForm

WORD = 8  # numbers in one stored int32
FLOATS = ("F16", "BF16", "F32")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A matrix [rows, columns] of integers in 4 bits. Its formats say how numbers, scales and zeros are read."""

    name: str
    rows: int
    columns: int
    group: int  # columns that share a scale
    packed: Plain
    scales: Plain
    zeros: Plain | None
    index: Plain | None  # int32 [columns]: the group of each

    by_columns: ClassVar[bool]  # whether files have columns one after another, or rows
    endings: ClassVar[Mapping[str, str]]  # by field, of tensors' names; also of a tensor that nobody reads

    @staticmethod
    def size(packed: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a weight whose numbers are stored in that shape."""
        raise NotImplementedError

    @staticmethod
    def shapes(rows: int, columns: int, groups: int) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of the tensors that are stored, by field."""
        raise NotImplementedError

    @property
    def path(self) -> Path:
        return self.packed.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    def read_numbers(self, rows: range, columns: range) -> Tensor:
        """uint8 [rows, columns / 2], as PackedLinear has them. columns: of whole words."""
        raise NotImplementedError

    def read_scales(self, rows: range, groups: range) -> Tensor:
        """Reads scales as floats [rows, groups]."""
        raise NotImplementedError

    def read_zeros(self, zeros: Plain, rows: range, groups: range) -> Tensor:
        """Reads zeros as uint8 [rows, groups]."""
        raise NotImplementedError

    def read_index(self) -> Tensor | None:
        """int32 [columns], the group of each; None where groups are neighbours. Raises InvalidWeights."""
        if self.index is None:
            return None
        groups, neighbours = read_rows(self.index, range(self.columns)), torch.arange(self.columns) // self.group
        if groups.dtype != torch.int32 or not 0 <= int(groups.min()) <= int(groups.max()) < self.columns // self.group:
            raise InvalidWeights(
                f"{self.path}: tensor {self.index.name} has {groups.dtype} from {int(groups.min())} to "
                f"{int(groups.max())}; it must have int32 from 0 to {self.columns // self.group - 1}"
            )
        return None if torch.equal(groups, neighbours) else groups

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        return Int4Tensor(self, "weight", 1).parts(one)

    def kept(self) -> Mapping[str, StoredWeight]:
        kept = {"numbers": Int4Tensor(self, "numbers", 2), "scales": Int4Tensor(self, "scales", self.group)}
        return kept if self.zeros is None else kept | {"zeros": Int4Tensor(self, "zeros", self.group)}


Weight = TypeVar("Weight", bound=Int4Weight)


@dataclass(frozen=True, eq=False)
class Int4Tensor:
    """The matrix, or one of the tensors that memory keeps for it."""

    weight: Int4Weight
    kind: str  # `weight`, or see Packed.tensors
    width: int  # columns of the matrix that one of its columns is for

    @property
    def path(self) -> Path:
        return self.weight.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.rows, self.weight.columns // self.width

    def parts(self, one: Slice) -> Sequence[WeightPart]:
        first, column = (0, one.begin) if one.dim == 1 else (one.begin, 0)
        dim = int(self.weight.by_columns)
        step = max(1, PART_NUMBERS // 2 // self.shape[1 - dim])
        if self.weight.by_columns:
            whole = lcm(WORD, self.width) // self.width  # columns that begin with a word
            step = max(whole, step // whole * whole)
        return [
            Int4Part(self, first + (1 - dim) * index * step, column + dim * index * step, target)
            for index, target in enumerate(one.target.split(step, dim))
        ]

    def kept(self) -> Mapping[str, StoredWeight]:
        return {}


@dataclass(frozen=True, eq=False)
class Int4Part:
    """Some columns of consecutive rows."""

    tensor: Int4Tensor
    first: int
    column: int
    target: Tensor

    @property
    def location(self) -> tuple[Path, int]:
        weight = self.tensor.weight
        stored = {"scales": weight.scales, "zeros": weight.zeros}.get(self.tensor.kind) or weight.packed
        lines = self.column * weight.rows if weight.by_columns else self.first * weight.columns
        return stored.path, stored.file.tensors[stored.name].begin + lines // 2

    def read(self, staging: Tensor) -> int:
        weight, (rows, columns) = self.tensor.weight, self.target.shape
        lines, across = range(self.first, self.first + rows), range(self.column, self.column + columns)
        if self.tensor.kind == "numbers":
            values = weight.read_numbers(lines, range(2 * across.start, 2 * across.stop))
        elif self.tensor.kind == "scales":
            values = weight.read_scales(lines, across)
        elif self.tensor.kind == "zeros" and weight.zeros is not None:
            values = weight.read_zeros(weight.zeros, lines, across)
        else:
            values = self._dequantized(lines, across)
        fill(self.target, values)
        return self.target.nbytes

    def _dequantized(self, rows: range, columns: range) -> Tensor:
        weight = self.tensor.weight
        words = range(columns.start // WORD * WORD, -(-columns.stop // WORD) * WORD)
        index = weight.read_index()
        owners = torch.arange(weight.columns) // weight.group if index is None else index
        owners = owners[words.start : words.stop]
        groups = range(int(owners.min()), int(owners.max()) + 1)
        zeros = None if weight.zeros is None else weight.read_zeros(weight.zeros, rows, groups)
        scales, numbers = weight.read_scales(rows, groups).float(), weight.read_numbers(rows, words)
        packed = PackedLinear(numbers.contiguous(), scales, zeros, (owners - groups.start).int(), None)
        return dequantize(packed, 0, len(rows)).narrow(1, columns.start - words.start, len(columns))


def read_rows(stored: Plain, rows: range) -> Tensor:
    """Reads rows of a tensor of one or two dimensions, in its dtype."""
    dtype, tensor = stored.file.dtype_of(stored.name), stored.file.tensors[stored.name]
    row_bytes = dtype.itemsize * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
    read = read_bytes(stored.file, tensor.begin + rows.start * row_bytes, len(rows) * row_bytes).view(dtype)
    return read.view(len(rows), -1) if len(tensor.shape) > 1 else read


def numbers_of(words: Tensor) -> Tensor:
    """uint8 [n, 8 · m] of int32 [n, m]: from the low bits to the high ones."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def find_int4(
    plain: Mapping[str, Plain], quantization: Quantization, kind: type[Weight]
) -> tuple[dict[str, Weight], set[str]]:
    """See Format.find."""
    found, used = dict[str, Weight](), set[str]()
    for name, packed in plain.items():
        if not name.endswith(kind.endings["packed"]):
            continue
        module = name.removesuffix(kind.endings["packed"])
        stored = {field: plain[module + end] for field, end in kind.endings.items() if module + end in plain}
        used |= {one.name for one in stored.values()}
        wanted = ("scales", "zeros") if quantization.zeros else ("scales",)
        missing = [module + kind.endings[field] for field in wanted if field not in stored]
        if missing or len(packed.shape) != 2:
            raise InvalidWeights(
                f"{packed.path}: tensor {name} has shape {list(packed.shape)}; it must have two dimensions, and "
                f"{' and '.join(missing or ['scales'])} beside it"
            )
        rows, columns = kind.size(packed.shape)
        group = columns if quantization.block is None else quantization.block[1]
        zeros = stored.get("zeros") if quantization.zeros else None
        one = kind(f"{module}.weight", rows, columns, group, packed, stored["scales"], zeros, stored.get("index"))
        _check(one, stored)
        found[one.name] = one
    return found, used


def _check(weight: Int4Weight, stored: Mapping[str, Plain]) -> None:
    """InvalidWeights where a tensor has another shape, or is stored as another type."""
    if weight.group % WORD or weight.columns % weight.group:
        raise InvalidWeights(
            f"{weight.path}: tensor {weight.packed.name} has {weight.columns} columns in groups of {weight.group}; a "
            f"group must have a multiple of {WORD} columns, and all of them as many"
        )
    for field, shape in weight.shapes(weight.rows, weight.columns, weight.columns // weight.group).items():
        dtypes = FLOATS if field == "scales" else ("I32",)
        one = stored.get(field)
        if one is not None and (one.shape != shape or one.file.tensors[one.name].dtype_name not in dtypes):
            raise InvalidWeights(
                f"{one.path}: tensor {one.name} is {one.file.tensors[one.name].dtype_name} of {list(one.shape)}; for "
                f"{weight.rows} rows of {weight.columns} columns in groups of {weight.group} it must be "
                f"{' or '.join(dtypes)} of {list(shape)}"
            )


def int4_form(parts: Sequence[StoredWeight], columns: int) -> Form:
    """Returns the packed form where all parts have groups of one size, and an expert's parts have equal groups. Else
    reading dequantizes them."""
    stored = [part for part in parts if isinstance(part, Int4Weight)]
    if len(stored) < len(parts) or len({(part.group, part.zeros is None) for part in stored}) != 1:
        return DENSE
    first = stored[0]
    group = first.group if first.group < first.columns else None
    _check_columns(first, columns, group or WORD)
    by_expert: dict[str, list[Tensor | None]] = {}
    for part in stored:
        expert = EXPERT.search(part.name)
        by_expert.setdefault(expert[1] if expert else "", []).append(part.read_index())
    orders = [order for held in by_expert.values() for order in held if order is not None]
    if not orders:
        return PackedForm(group, zeros=first.zeros is not None)
    firsts = [held[0] for held in by_expert.values() for _ in held if held[0] is not None]
    if len(orders) < len(stored) or not all(map(torch.equal, orders, firsts)):
        return DENSE
    if columns != first.columns:
        raise InvalidWeights(
            f"{first.path}: the groups of {first.name} have columns of all ranks, since act-order chose them; 1 rank "
            "can have them"
        )
    groups = torch.stack([held[0] for held in by_expert.values() if held[0] is not None])
    return PackedForm(group, zeros=first.zeros is not None, groups=groups if "" not in by_expert else groups[0])


def _check_columns(weight: Int4Weight, columns: int, size: int) -> None:
    """InvalidWeights where ranks have parts of `size` columns that belong together."""
    if columns % size:
        fit = [ranks for ranks in range(1, weight.columns // size + 1) if weight.columns % (ranks * size) == 0]
        raise InvalidWeights(
            f"{weight.path}: {weight.name} has groups of {size} columns, of which a rank would have {columns} of "
            f"{weight.columns}; it must have whole groups, and numbers of ranks that fit are {fit}"
        )


def read_group(section: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: a row has one, as -1 or nothing says. Raises InvalidConfig."""
    size = section.raw(name)
    if size is None or (type(size) is int and size == -1):
        return None
    if type(size) is not int or not 1 <= size <= MAX_BLOCK:
        raise section.invalid(name, f"-1 or an integer from 1 to {MAX_BLOCK}")
    return 1, size


def int4_dummy(quantization: Quantization) -> Form:
    return PackedForm(None if quantization.block is None else quantization.block[1], zeros=quantization.zeros)
