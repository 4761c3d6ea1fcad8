"""GPTQ's layout: X.qweight I32 [columns / 8, rows], X.qzeros I32 [groups, rows / 8] and X.scales [groups, rows].

A word of X.qweight has 8 columns, one of X.qzeros the zeros of 8 rows, the first in its low bits. Files of version 1
have each zero less one. X.g_idx I32 [columns] has the group of each column: with act-order groups are no neighbours.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.stored import Plain
from tandem.workers.weights.formats.format import Format, Method, Quantization, accept, read_modules
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

VERSIONS = {None: "gptq", "gptq": "gptq", "gptq_v2": "gptq_v2"}  # by checkpoint_format, see FORMATS


class GptqWeight(Int4Weight):
    """See Int4Weight. Its zeros are version 1's."""

    by_columns = True
    endings = MappingProxyType({"packed": ".qweight", "scales": ".scales", "zeros": ".qzeros", "index": ".g_idx"})
    less = 1  # than a zero is what is stored for it

    @staticmethod
    def size(packed: tuple[int, ...]) -> tuple[int, int]:
        return packed[1], packed[0] * WORD

    @staticmethod
    def shapes(rows: int, columns: int, groups: int) -> Mapping[str, tuple[int, ...]]:
        words = {"packed": (columns // WORD, rows), "zeros": (groups, rows // WORD), "index": (columns,)}
        return words | {"scales": (groups, rows)}

    def read_numbers(self, rows: range, columns: range) -> Tensor:
        words = read_rows(self.packed, range(columns.start // WORD, columns.stop // WORD))
        return words[:, rows.start : rows.stop].T.flatten().view(torch.uint8).view(len(rows), -1)

    def read_scales(self, rows: range, groups: range) -> Tensor:
        return read_rows(self.scales, groups)[:, rows.start : rows.stop].T

    def read_zeros(self, zeros: Plain, rows: range, groups: range) -> Tensor:
        return (numbers_of(read_rows(zeros, groups))[:, rows.start : rows.stop].T + self.less) & 15


class Gptq2Weight(GptqWeight):
    """A GptqWeight whose zeros are stored as they are."""

    less = 0


def _read(section: Fields, served: str) -> Quantization:
    accept(section, "sym", (True, False), served)
    accept(section, "checkpoint_format", tuple(VERSIONS), served)
    accept(section, "dynamic", (None,), "one format for all modules")
    unquantized = read_modules(section, "modules_to_not_convert")
    version, zeros = VERSIONS[section.raw("checkpoint_format")], not section.raw("sym")
    return Quantization(version, read_group(section, "group_size"), unquantized=unquantized, zeros=zeros)


GPTQ = Format(partial(find_int4, kind=GptqWeight), int4_form, int4_dummy)
GPTQ_2 = Format(partial(find_int4, kind=Gptq2Weight), int4_form, int4_dummy)
GPTQ_METHOD = Method("GPTQ's integers of 4 bits", _read)
