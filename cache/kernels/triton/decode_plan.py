"""The plan of a captured decode step: the positions and sequence that each program attends to.

A step waits for its slowest attention program. So schedule_splits() divides long sequences into parts of about equal
length. It runs on the device, once a step, with that step's lengths. The host plans nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.sizes import next_power_of_2

LEAST_ROWS = 16  # of a tensor core's tile
PROGRAMS = 256  # that a step is shared out over at most, two a multiprocessor: more cost more to merge than they bring
THREE_EACH = 384  # programs, three a multiprocessor
MAX_SPLITS = 32  # of one sequence alone
ENTRY = tl.constexpr(8)  # words of an entry: row, split, splits of the row, begin, end, first entry, first page, -
SPARE = 16  # entries that a step has at least beyond one a row
SHARE = 2  # an entry more for each so many rows: half of the rows can have two pieces
ENDS = tl.constexpr(4)  # what a program leaves after its sums, padding included


@dataclass(frozen=True)
class Tiling:
    """block: positions at once, the least that a share has. two: no third program may stand on a multiprocessor."""

    block: int
    warps: int
    stages: int
    two: bool = False


# By measurement, see docs/decisions 0019 to 0022.
# MANY: as many programs on a multiprocessor as fit. FEW, by head_dim, others as of 128 (in Triton's interpreter): tiles
# of K and V that take 64 KiB; with their stages those of 8 bits leave no room for a third program. Heads of 256 were
# not measured with two. SOME: of no more than three programs a multiprocessor.
# WIDE, of 512: as much as fits; nobody has measured it.
MANY, MANY_FP8 = Tiling(64, 2, 3), Tiling(128, 2, 3)
FEW = {64: Tiling(256, 8, 2, two=True), 128: Tiling(128, 4, 3, two=True), 256: Tiling(64, 4, 3)}
SOME = {128: Tiling(128, 4, 3)}
WIDE, WIDE_FP8 = Tiling(32, 8, 2), Tiling(64, 8, 2)
FEW_FP8 = {64: Tiling(256, 4, 7), 128: Tiling(128, 4, 7), 256: Tiling(64, 4, 7)}


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A decode step of B rows at fixed addresses, of a pool with Hkv heads of D numbers.

    programs: how many programs rows of equal lengths occupy; the tiling is chosen by it.

    pack: how many new tokens of one sequence a program attends for at once, in a verify step without a window. A tile
    has room for so many, and reads its sequence once for all. In other steps 1.
    """

    tables: DeviceTables
    programs: int
    pack: int
    schedule: Tensor
    """int32 [entries, 8]: each entry is one piece of one sequence, as schedule_splits() writes it."""
    partial: Tensor
    """float32 [Hq · pack, entries, D + 4]: what each piece found, then row_max, row_sum and padding to 16 bytes."""
    counters: Tensor
    """int32 [B, Hkv]: pieces that are done; 0 between layers."""

    @classmethod
    def make(cls, tables: DeviceTables, num_q_heads: int, num_kv_heads: int, head_dim: int) -> "DecodePlan":
        rows, device = tables.slots.shape[0], tables.slots.device
        fair = PROGRAMS // (rows * num_kv_heads)
        # Rows of unlike lengths need entries beyond one a row, or the longest could not be cut. Each costs a program,
        # which ends at once where lengths are alike.
        entries = max(min(PROGRAMS // num_kv_heads, MAX_SPLITS * rows), rows + max(SPARE, rows // SHARE))
        group = num_q_heads // num_kv_heads
        pack = 1 if tables.preceding is None else tile_rows(group) // group
        return cls(
            tables,
            rows * num_kv_heads * max(1, min(fair, MAX_SPLITS)),
            pack,
            torch.full((entries, ENTRY.value), -1, dtype=torch.int32, device=device),
            torch.empty((num_q_heads * pack, entries, head_dim + ENDS.value), dtype=torch.float32, device=device),
            torch.zeros((rows, num_kv_heads), dtype=torch.int32, device=device),
        )

    @property
    def most_splits(self) -> int:
        """The most splits of one sequence, if each other sequence has one."""
        return self.schedule.shape[0] - self.tables.slots.shape[0] + 1


def tile_rows(group: int) -> int:
    """Returns the rows of q in a program's tile, for groups of so many q heads."""
    return max(LEAST_ROWS, next_power_of_2(group))


def choose_tiling(plan: DecodePlan, head_dim: int, fp8: Fp8Entries | None) -> Tiling:
    if head_dim == 512:
        return WIDE if fp8 is None else WIDE_FP8
    if plan.programs <= PROGRAMS:
        few = FEW if fp8 is None else FEW_FP8
        return few.get(head_dim, few[128])
    if fp8 is not None:
        return MANY_FP8
    return SOME.get(head_dim, MANY) if plan.programs <= THREE_EACH else MANY


def schedule_splits(plan: DecodePlan, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
    """Queues the kernel that cuts the sequences of plan.tables into pieces, as long as they are when it runs. It comes
    before the step's first decode(), once for all layers, and not right before it: decode() reads without waiting."""
    page_size, head_dim = pool.shape[4], pool.shape[5]
    rows, entries = plan.tables.slots.shape[0], plan.schedule.shape[0]
    tiling = choose_tiling(plan, head_dim, fp8)
    longest = plan.tables.kv_indices.shape[0] * page_size // tiling.block + 1
    kernel: Any = _schedule[(rows,)]
    kernel(
        plan.tables.kv_indptr,
        plan.tables.kv_last_page_len,
        plan.tables.kv_indptr if plan.tables.preceding is None else plan.tables.preceding,
        plan.schedule,
        rows,
        entries,
        ROWS=next_power_of_2(rows),
        MOST=next_power_of_2(plan.most_splits),
        PAGE_SIZE=page_size,
        BLOCK=tiling.block,
        WINDOW=scoring.window or 0,
        BITS=longest.bit_length(),
        FULL=plan.programs > PROGRAMS,
        RUNS=plan.tables.preceding is not None,
        PACK=1 if scoring.window else plan.pack,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["rows", "entries"])  # numbers of rows share what is compiled
def _schedule(
    kv_indptr, kv_last_page_len, preceding, schedule, rows, entries,
    ROWS: tl.constexpr, MOST: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, BITS: tl.constexpr, FULL: tl.constexpr, RUNS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Each program writes the entries of one row; longer pieces come first, so that the last to run are short. Only the
    last of every PACK rows of one sequence has entries, for all PACK.

    A piece has at most `most` blocks of positions: the fewest with which all rows fit into `room`. Where like
    lengths fill the device anyway (FULL), pieces shorter than the mean sequence would only add merges.
    """
    row, mine = tl.arange(0, ROWS), tl.program_id(0)
    here = row < rows
    first_page = tl.load(kv_indptr + row, mask=here, other=0)
    num_pages = tl.load(kv_indptr + row + 1, mask=here, other=1) - first_page
    stored = (num_pages - 1) * PAGE_SIZE + tl.load(kv_last_page_len + row, mask=here, other=1) - 1
    oldest = tl.maximum(stored + 1 - WINDOW, 0) if WINDOW > 0 else tl.zeros_like(stored)
    if RUNS:  # new tokens of the rows before are not read from pages
        stored -= tl.load(preceding + row, mask=here, other=0)
        oldest = tl.minimum(oldest, stored)
    if PACK > 1:
        index = tl.load(preceding + row, mask=here, other=0)
        following = tl.load(preceding + row + 1, mask=row + 1 < rows, other=0)
        here &= (index % PACK == PACK - 1) | (following == 0)
    blocks = tl.where(here, tl.cdiv(stored - oldest, BLOCK), 0)
    one = tl.where(here, 1, 0)
    room = entries - rows + tl.sum(one, 0) if PACK > 1 else entries  # see most_splits
    too_few = 0
    for bit in tl.static_range(BITS):  # pyright: ignore[reportGeneralTypeIssues]
        tried = too_few + (1 << (BITS - 1 - bit))
        used = tl.maximum(tl.cdiv(blocks, tried), one)
        too_few = tl.where(tl.sum(used, 0) > room, tried, too_few)
    most = too_few + 1
    if FULL:
        most = tl.maximum(most, tl.cdiv(tl.sum(blocks, 0) * 9, tl.sum(one, 0) * 8))
    used = tl.maximum(tl.cdiv(blocks, most), one)
    piece = tl.maximum(tl.cdiv(blocks, tl.maximum(used, 1)), 1)  # pieces of a row are alike
    used = tl.maximum(tl.cdiv(blocks, piece), one)
    is_mine = row == mine
    my_piece = tl.sum(tl.where(is_mine, piece, 0), 0)
    my_used = tl.sum(tl.where(is_mine, used, 0), 0)
    begin = tl.sum(tl.where(is_mine, oldest, 0), 0)
    end = tl.sum(tl.where(is_mine, stored, 0), 0)
    page = tl.sum(tl.where(is_mine, first_page, 0), 0)
    before = (piece > my_piece) | ((piece == my_piece) & (row < mine))
    first = tl.sum(tl.where(before, used, 0), 0)
    split = tl.arange(0, MOST)
    entry = schedule + (first + split) * ENTRY
    mask = split < my_used
    tl.store(entry, tl.zeros_like(split) + mine, mask=mask)
    tl.store(entry + 1, split, mask=mask)
    tl.store(entry + 2, tl.zeros_like(split) + my_used, mask=mask)
    from_ = begin + split * my_piece * BLOCK
    tl.store(entry + 3, from_, mask=mask)
    tl.store(entry + 4, tl.minimum(from_ + my_piece * BLOCK, end), mask=mask)
    tl.store(entry + 5, tl.zeros_like(split) + first, mask=mask)
    tl.store(entry + 6, tl.zeros_like(split) + page, mask=mask)
    if mine == 0:
        total = tl.sum(used, 0)
        tl.store(schedule + (total + split) * ENTRY, tl.zeros_like(split) - 1, mask=total + split < entries)
