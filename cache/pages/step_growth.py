"""How page tables change by a step, in all layer groups at once: page_tables.c plans it where that can be built."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.cache.kernels.build.native_build import load_short_calls
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, address_of
from tandem.cache.plan.spans import Span

SOURCE = Path(__file__).parents[1] / "kernels" / "native" / "page_tables.c"
GOING = 2  # pages that a row drops at most, on average over the rows of a step
CHANGED = 2  # what plan_step returns where something changes
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Group(ctypes.Structure):
    """Group of page_tables.c."""

    _fields_ = (
        ("pages", POINTER),
        ("begins", POINTER),
        ("ends", POINTER),
        ("budgets", POINTER),
        ("max_pages", INT64),
        ("every", INT64),
        ("page_size", INT64),
        ("window", INT64),
        ("chunk", INT64),
        ("grain", INT64),
    )


class StepChange(NamedTuple):
    """The changes of a step in one group, int64 [n] except gone. rows hold pages from begins on; those from starts
    on, counts of them, are new. opened_rows begin their last page, at opened_ends. gone: int32, pages that leave the
    window. num_pages: the sum of counts."""

    rows: Int64Array
    begins: Int64Array
    starts: Int64Array
    counts: Int64Array
    opened_rows: Int64Array
    opened_ends: Int64Array
    gone: Int32Array
    num_pages: int


class StepGrowth:
    """Plans growth in C code like lay_out_appends and GroupPages.plan_growth, for rows that own their partial pages."""

    def __init__(
        self,
        library: ctypes.PyDLL,
        tables: Sequence[GroupTable],
        keeps: Sequence[Span],
        grain: int,
        reserved: Int64Array,
    ) -> None:
        """tables, keeps: of each group; no group keeps an encoder's entries. grain: see Span. reserved: int64
        [max_sequences], see SequenceTable."""
        self._given = tables, keeps, grain, reserved  # C reads their arrays
        count = len(tables)
        self._sizes, self._changes = np.empty((count, 4), np.int64), np.empty(count * 6 * reserved.size, np.int64)
        self._gone = np.empty(count * GOING * reserved.size, np.int32)
        self._groups = (_Group * len(tables))(
            *(
                _Group(
                    *(address_of(array) for array in (table.pages, table.begins, table.ends, table.budgets)),
                    table.pages.shape[1],
                    table.every,
                    table.paging.reach,
                    span.window or 0,
                    span.chunk or 0,
                    grain,
                )
                for table, span in zip(tables, keeps, strict=True)
            )
        )
        self._address = ctypes.addressof(self._groups)
        outputs = self._sizes, self._changes, self._gone
        self._fixed = tuple(map(address_of, (reserved, *outputs)))
        self._plan = library.plan_step
        self._plan.argtypes = (POINTER, INT32, INT32, *(POINTER,) * 8, INT32)
        self._plan.restype = INT32

    @classmethod
    def load(
        cls, tables: Sequence[GroupTable], keeps: Sequence[Span], grain: int, reserved: Int64Array
    ) -> "StepGrowth | None":
        """Loads the C code; None where it cannot be built."""
        library = load_short_calls(SOURCE)
        return None if library is None else cls(library, tables, keeps, grain, reserved)

    def plan(
        self, rows: Int64Array, lengths: Int64Array, new_lengths: Int64Array, queries: Int64Array
    ) -> list[StepChange] | None:
        """Plans each group's changes when rows (int64 [B], B ≥ 1) of `lengths` grow to new_lengths, seen by `queries`,
        int64 [B] each. Returns an empty list if nothing changes. None where more pages go than a step drops. The
        arrays hold until the next call."""
        count, groups, room = rows.size, len(self._groups), GOING * rows.size
        at = address_of(lengths)
        seen = at if queries is lengths else address_of(queries)
        found = self._plan(
            self._address, groups, count, address_of(rows), at, address_of(new_lengths), seen, *self._fixed, room
        )
        if found < CHANGED:
            return [] if found else None
        changes = self._changes[: groups * 6 * count].reshape(groups, 6, count)
        gone = self._gone[: groups * room].reshape(groups, room)
        return [
            StepChange(
                changes[group, 0, :changed],
                changes[group, 1, :changed],
                changes[group, 2, :changed],
                changes[group, 3, :changed],
                changes[group, 4, :opened],
                changes[group, 5, :opened],
                gone[group, :going],
                taken,
            )
            for group, (changed, opened, going, taken) in enumerate(self._sizes.tolist())
        ]
