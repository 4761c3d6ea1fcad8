"""AWQ's GEMM layout: X.qweight I32 [columns, rows / 8], X.qzeros I32 [groups, rows / 8] and X.scales [groups, rows].

A word has 8 rows, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its low bits.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.stored import Plain
from tandem.workers.weights.formats.format import Format, Method, Quantization, read_modules
from tandem.workers.weights.formats.int4 import (
    WORD,
    Int4Weight,
    find_int4,
    int4_dummy,
    int4_form,
    numbers_of,
    read_group,
    read_rows,
)

POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of each row in its word


class AwqWeight(Int4Weight):
    """See Int4Weight."""

    by_columns = True
    endings = MappingProxyType({"packed": ".qweight", "scales": ".scales", "zeros": ".qzeros"})

    @staticmethod
    def size(packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[1] * WORD, packed[0]

    @staticmethod
    def shapes(rows: int, columns: int, groups: int) -> Mapping[str, tuple[int, ...]]:
        return {"packed": (columns, rows // WORD), "scales": (groups, rows), "zeros": (groups, rows // WORD)}

    def read_numbers(self, rows: range, columns: range) -> Tensor:
        words = read_rows(self.packed, columns)
        packed = torch.empty(self.rows, len(columns) // 2, dtype=torch.uint8)
        for row, position in enumerate(POSITIONS):
            numbers = (words >> 4 * position & 15).to(torch.uint8)
            packed[row::WORD] = (numbers[0::2] | numbers[1::2] << 4).T
        return packed[rows.start : rows.stop]

    def read_scales(self, rows: range, groups: range) -> Tensor:
        return read_rows(self.scales, groups)[:, rows.start : rows.stop].T

    def read_zeros(self, zeros: Plain, rows: range, groups: range) -> Tensor:
        numbers = numbers_of(read_rows(zeros, groups)).unflatten(1, (-1, WORD))
        return numbers[:, :, POSITIONS].flatten(1)[:, rows.start : rows.stop].T


def _read(section: Fields, _served: str) -> Quantization:
    return Quantization(
        "awq",
        read_group(section, "group_size"),
        unquantized=read_modules(section, "modules_to_not_convert"),
        zeros=True,
    )


AWQ = Format(partial(find_int4, kind=AwqWeight), int4_form, int4_dummy)
AWQ_METHOD = Method("AWQ's integers of 4 bits", _read)
