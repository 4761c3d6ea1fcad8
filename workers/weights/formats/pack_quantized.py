"""compressed-tensors' pack-quantized: X.weight_packed I32 [rows, columns / 8] and X.weight_scale [rows, groups].

X.weight_zero_point I32 [rows / 8, groups] is there where they are not symmetric; a word has 8 rows. In every word the
low bits come first, and 8 stands for 0. X.weight_g_idx I32 [columns] has the group of each column, with act-order.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.workers.checkpoint.stored import Plain
from tandem.workers.weights.formats.format import Format
from tandem.workers.weights.formats.int4 import WORD, Int4Weight, find_int4, int4_dummy, int4_form, read_rows


class PackQuantizedWeight(Int4Weight):
    """See Int4Weight."""

    by_columns = False
    endings = MappingProxyType(
        {
            "packed": ".weight_packed",
            "scales": ".weight_scale",
            "zeros": ".weight_zero_point",
            "index": ".weight_g_idx",
            "shape": ".weight_shape",
        }
    )

    @staticmethod
    def size(packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[0], packed[1] * WORD

    @staticmethod
    def shapes(rows: int, columns: int, groups: int) -> Mapping[str, tuple[int, ...]]:
        words = {"packed": (rows, columns // WORD), "zeros": (-(-rows // WORD), groups), "index": (columns,)}
        return words | {"scales": (rows, groups)}

    def read_numbers(self, rows: range, columns: range) -> Tensor:
        return read_rows(self.packed, rows).view(torch.uint8)[:, columns.start // 2 : columns.stop // 2]

    def read_scales(self, rows: range, groups: range) -> Tensor:
        return read_rows(self.scales, rows)[:, groups.start : groups.stop]

    def read_zeros(self, zeros: Plain, rows: range, groups: range) -> Tensor:
        first = rows.start // WORD
        words = read_rows(zeros, range(first, -(-rows.stop // WORD)))[:, None, groups.start : groups.stop]
        numbers = (words >> torch.arange(0, 4 * WORD, 4)[:, None]).to(torch.uint8) & 15
        return numbers.flatten(0, 1).narrow(0, rows.start - first * WORD, len(rows))


PACK_QUANTIZED = Format(partial(find_int4, kind=PackQuantizedWeight), int4_form, int4_dummy)
