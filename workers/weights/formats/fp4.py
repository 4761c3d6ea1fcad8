"""Matrices in 4 bits: X.weight I8 [R, C / 2], and X.scale F8_E8M0 [R, C / 32].

DeepSeek-V4 has its experts in this form, and other weights in 8 bits. A byte holds two numbers, the first in its low
bits. 32 numbers of a row share an exponent of two, stored plus 127.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.stored import Plain, StoredWeight
from tandem.workers.kernels.torch.packed import number_pairs
from tandem.workers.weights.formats.format import Format, Quantization
from tandem.workers.weights.formats.fp8 import Fp8Weight
from tandem.workers.weights.formats.mxfp4 import Bytes, mxfp4_form

PACKED, EXPONENTS = "I8", "F8_E8M0"
NUMBERS = 32  # that share an exponent


@dataclass(frozen=True, eq=False)
class Fp4Weight(Fp8Weight):
    """A matrix in 4 bits, each row with its own scales."""

    @classmethod
    def beside(cls, packed: Plain, scales: Plain) -> "Fp4Weight":
        """Raises InvalidWeights where shapes or types do not fit each other."""
        shape, dtype = packed.shape, scales.file.tensors[scales.name].dtype_name
        grid = (shape[0], 2 * shape[1] // NUMBERS) if len(shape) == 2 else None
        if grid is None or 2 * shape[1] % NUMBERS or scales.shape != grid or dtype != EXPONENTS:
            raise InvalidWeights(
                f"{packed.path}: tensors {packed.name} and {scales.name} are {PACKED} and {dtype} of shapes "
                f"{list(shape)} and {list(scales.shape)}; a matrix in 4 bits must be {PACKED} of [R, C / 2], and its "
                f"scales {EXPONENTS} of [R, C / {NUMBERS}]"
            )
        return cls(packed.file, packed.name, scales, (1, NUMBERS), grid)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, packed = self.file.tensors[self.name].shape
        return rows, 2 * packed

    @property
    def row_bytes(self) -> int:
        return self.shape[1] // 2

    def kept(self) -> Mapping[str, StoredWeight]:
        rows, columns = self.shape
        numbers = Bytes(Plain(self.file, self.name), (rows, columns // 2))
        return {"numbers": numbers, "scales": Bytes(self.scales, self.grid)}

    def numbers(self, first: int, count: int) -> Tensor:
        pairs = self.stored_rows(first, count)
        table = number_pairs(True, pairs.device)
        return table.index_select(0, pairs.int()).view(torch.float32).view(count, -1)


def _find(plain: Mapping[str, Plain], quantization: Quantization) -> tuple[dict[str, Fp4Weight], set[str]]:
    found, used = dict[str, Fp4Weight](), set[str]()
    for name, one in plain.items():
        if one.file.tensors[name].dtype_name != PACKED:
            continue
        scales = name.removesuffix("weight") + "scale"
        if not name.endswith(".weight") or scales not in plain:
            raise InvalidWeights(f"{one.path}: tensor {name} is stored as {PACKED}; it must have {scales} beside it")
        found[name] = Fp4Weight.beside(one, plain[scales])
        used.add(scales)
    return found, used


FP4 = Format(_find, partial(mxfp4_form, kind=Fp4Weight))
