"""A layer's decode step against norm, rotation and softmax in float64: on a GPU, else in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.kv_scales import FP8, FP8_MAX
from tandem.cache.plan.rope import Rotation
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.triton import decode_plan
from tandem.cache.kernels.triton.decode import decode
from tandem.cache.kernels.triton.decode_plan import DecodePlan, schedule_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, LAYERS, LAYER = 90, 2, 1
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """lengths: positions of each sequence, the new one included; 0: a row of padding. preceding: in a verify step, for
    each row, how many of the rows right before belong to its sequence. programs: that tiling is chosen for. fp8: pages
    of 8-bit entries, with scales of each head, of q, k and v in dtype. gated: something stands between heads of q.
    """

    lengths: tuple[int, ...] = (5, 1, 70, 0)
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = None
    page_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    norm: bool = False
    gated: bool = False
    rotate: bool = True
    entries: int = 6
    programs: int = 1000
    fp8: bool = False
    dtype: torch.dtype = torch.float16
    preceding: tuple[int, ...] | None = None

    def run(self, row: int) -> range:
        """The rows up to this one that are of its sequence."""
        return range(row - (self.preceding[row] if self.preceding else 0), row + 1)


CASES = {
    "plain": Case(),
    "shares of one sequence": Case(lengths=(300, 8, 129), entries=9),
    "one program": Case(lengths=(200, 65), entries=2),
    "few sequences": Case(lengths=(400,), entries=16, programs=100),
    "few sequences, heads of 64": Case(lengths=(300, 380), head_dim=64, programs=100, norm=True),
    "few sequences, heads of 128": Case(
        lengths=(400, 9), head_dim=128, page_size=16, entries=8, programs=100, norm=True
    ),
    "some sequences, heads of 128": Case(lengths=(300, 9), head_dim=128, page_size=16, programs=300, norm=True),
    "pages of 64": Case(lengths=(130, 64, 65), page_size=64),
    "heads are normed": Case(norm=True),
    "gates behind heads": Case(gated=True, norm=True, rotary_dim=8),
    "no rotation": Case(rotate=False, norm=True),
    "partial rotary, normed": Case(rotary_dim=8, norm=True),
    "groups of 3": Case(q_heads=6, lengths=(130, 3)),
    "one head": Case(q_heads=1, kv_heads=1),
    "a window": Case(window=20, lengths=(20, 21, 200)),
    "a window of 1": Case(window=1, lengths=(1, 2, 90)),
    "a cap": Case(softcap=2.0, lengths=(100, 9)),
    "sinks": Case(sinks=True, lengths=(140, 1)),
    "all at once": Case(sinks=True, norm=True, window=100, softcap=3.0, q_heads=14, lengths=(250, 0)),
    "8 bits": Case(fp8=True),
    "8 bits, shares": Case(fp8=True, head_dim=64, lengths=(300, 8, 129), entries=9, norm=True),
    "8 bits, few sequences": Case(fp8=True, lengths=(700,), entries=16, programs=100),
    "8 bits, few sequences, heads of 64": Case(fp8=True, lengths=(700,), head_dim=64, programs=100),
    "8 bits, bfloat16": Case(fp8=True, dtype=torch.bfloat16, rotate=False, entries=4),
    "8 bits, all at once": Case(
        sinks=True, norm=True, window=100, softcap=3.0, q_heads=14, lengths=(250, 0), head_dim=32, fp8=True
    ),
    "drafts": Case(lengths=(5, 70, 71, 72, 1, 2, 0), preceding=(0, 0, 1, 2, 0, 1, 0), norm=True),
    "drafts over pages, shares": Case(lengths=(300, 301, 302, 303, 129), preceding=(0, 1, 2, 3, 0), entries=12),
    "drafts, few sequences, heads of 64": Case(
        lengths=(300, 301), preceding=(0, 1), head_dim=64, programs=100, norm=True, sinks=True
    ),
    "drafts, a window": Case(lengths=(20, 21, 22, 200, 201), preceding=(0, 1, 2, 0, 1), window=20, softcap=2.0),
    "drafts longer than the window": Case(lengths=(1, 2, 3, 4, 30, 31, 32), preceding=(0, 1, 2, 3, 0, 1, 2), window=2),
    "drafts, two at a time": Case(
        lengths=(60, 61, 62, 63, 64, 3, 4, 9), preceding=(0, 1, 2, 3, 4, 0, 1, 0), q_heads=14, sinks=True, entries=12
    ),
    "drafts, more than a tile holds": Case(
        lengths=tuple(range(130, 150)), preceding=tuple(range(20)), q_heads=1, kv_heads=1, entries=25
    ),
    "drafts, gates behind heads": Case(
        lengths=(60, 61, 62, 63), preceding=(0, 1, 2, 3), q_heads=14, gated=True, norm=True
    ),
    "drafts, 8 bits": Case(lengths=(90, 91, 92, 7), preceding=(0, 1, 2, 0), fp8=True, entries=5),
}


class Step:
    """Random stored K and V on pages in no order, NaN wherever nothing is stored, and one new token a sequence."""

    def __init__(self, case: Case) -> None:
        self.case, generator = case, torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, case.dtype)

        rows, dim = len(case.lengths), case.head_dim
        heads = (case.q_heads, case.kv_heads, case.kv_heads)
        self.q, self.k, self.v = draw(rows, sum(heads), dim).split(heads, 1)
        if case.gated:
            self.q = torch.stack((self.q, torch.full_like(self.q, torch.nan)), 2).view(rows, -1, dim)[:, ::2]
        self.fp8 = self.entries(case) if case.fp8 else None
        if self.fp8 is not None:
            # Triton's interpreter rounds wrongly: what is new needs no rounding, but where it is normed or rotated.
            for new, scales in zip((self.k, self.v), self.fp8.scales[LAYER, :, :, None], strict=True):
                new.copy_((new / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8).float() * scales)
        self.rotation = None
        if case.rotate:
            self.rotation = Rotation(draw(rows, 2, case.rotary_dim or dim))
        self.sinks = draw(case.q_heads) if case.sinks else None
        self.weight = draw(sum(heads[:2]), dim)
        self.norm = HeadNorm(self.weight, EPS, lambda *_: pytest.fail("the kernel norms")) if case.norm else None
        shape = (PAGES, LAYERS, 2, case.kv_heads, case.page_size, dim)
        self.pool = torch.full(shape, torch.nan).to(DEVICE, FP8 if case.fp8 else case.dtype)
        order = np.random.default_rng(0).permutation(np.arange(1, PAGES)).tolist()
        counts = [max(-(-length // case.page_size), 1) for length in case.lengths]
        self.pages: list[list[int]] = []
        for row, wanted in enumerate(counts):
            known = self.pages[-1] if len(case.run(row)) > 1 else []
            self.pages.append(known + [order.pop() for _ in range(wanted - len(known))])
        self.stored: list[Tensor] = []
        for row, (length, pages) in enumerate(zip(case.lengths, self.pages, strict=True)):
            if len(case.run(row)) > 1:
                self.stored.append(self.stored[-1])
                continue
            stored = self.stored_as(draw(2, case.kv_heads, max(length - 1, 0), dim))
            self.stored.append(stored)
            for position in range(length - 1):
                page, offset = pages[position // case.page_size], position % case.page_size
                self.pool[page, LAYER, :, :, offset] = stored[:, :, position]

    @staticmethod
    def entries(case: Case) -> Fp8Entries:
        """Powers of two, by which nothing is rounded; some saturate what is drawn."""
        scales = torch.arange(6, 6 + 4 * case.kv_heads).remainder(4).add(6).neg().exp2().view(LAYERS, 2, -1).to(DEVICE)
        return Fp8Entries(case.dtype, scales, scales.reciprocal(), (None,) * LAYERS)

    def stored_as(self, kv: Tensor) -> Tensor:
        """kv [2, Hkv, n, D] as the pool's elements."""
        if self.fp8 is None:
            return kv
        return torch.stack(self.fp8.quantise(LAYER, *kv.transpose(1, 2))).transpose(1, 2)

    def exact(self, stored: Tensor) -> Tensor:
        """Returns the values of the pool's elements [2, Hkv, n, D]."""
        exact = stored.double()
        return exact if self.fp8 is None else exact * self.fp8.scales[LAYER, :, :, None, None].double()

    def tables(self) -> DeviceTables:
        size, lengths = self.case.page_size, self.case.lengths
        slots = [
            pages[(n - 1) // size] * size + (n - 1) % size if n else -1
            for n, pages in zip(lengths, self.pages, strict=True)
        ]
        indptr = np.cumsum([0, *map(len, self.pages)])
        last = [(max(n, 1) - 1) % size + 1 for n in lengths]
        arrays = (slots, indptr, last, [page for pages in self.pages for page in pages])
        *tables, preceding = (
            torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (*arrays, self.case.preceding or [])
        )
        return DeviceTables(*tables, preceding=preceding if self.case.preceding else None)

    def run(self, plan: DecodePlan) -> Tensor:
        scoring = Scoring(0.3, self.case.window, self.case.softcap)
        new = (self.q, self.k, self.v, self.rotation)
        schedule_splits(plan, self.pool, scoring, self.fp8)
        return decode(self.pool, LAYER, *new, plan, scoring, self.sinks, self.norm, self.fp8)

    def normed(self, heads: Tensor, weight: Tensor) -> Tensor:
        exact = heads.double()
        if self.norm is None:
            return exact
        return exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    def new_entries(self, row: int, pool: Tensor) -> Tensor:
        """The elements [2, Hkv, D] of a sequence's new token, in place."""
        page, offset = divmod(self.case.lengths[row] - 1, self.case.page_size)
        return pool[self.pages[row][page], LAYER, :, :, offset]

    def expected(self, stored_now: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns for each sequence o [Hq, D], float64, if `stored_now` is the pool, and the elements [2, Hkv, D] of
        its new token."""
        case, outputs = self.case, []
        rotation = self.rotation
        twice = None if rotation is None else Rotation(rotation.factors.double())
        q, k = self.normed(self.q, self.weight[: case.q_heads]), self.normed(self.k, self.weight[case.q_heads :])
        q, k = (q, k) if twice is None else (twice.apply(q), twice.apply(k))
        for row, stored in enumerate(self.stored):
            new = self.stored_as(torch.stack((k[row].to(case.dtype), self.v[row]))[:, :, None])[:, :, 0]
            found = torch.stack([self.new_entries(one, stored_now) for one in case.run(row)], 2)
            keys, values = torch.cat((self.exact(stored), self.exact(found)), 2)
            first = 0 if case.window is None else max(keys.shape[1] - case.window, 0)
            group = case.q_heads // case.kv_heads
            keys, values = (one[:, first:].repeat_interleave(group, 0) for one in (keys, values))
            scores = torch.einsum("hd,hnd->hn", q[row], keys) * 0.3
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
            weights = scores.softmax(1)[:, : keys.shape[1]]
            outputs.append((torch.einsum("hn,hnd->hd", weights, values), new))
        return outputs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_step(case: Case) -> None:
    step = Step(case)
    tables = step.tables()
    plan = DecodePlan.make(tables, case.q_heads, case.kv_heads, case.head_dim)
    plan = with_entries(plan, case.entries, case.programs)
    before = step.pool.clone()
    output = step.run(plan)
    assert not plan.counters.any()  # the next step begins as this did
    after = step.pool.clone()
    for row, (expected, entries) in enumerate(step.expected(step.pool)):
        if case.lengths[row]:
            assert_close(output[row], expected)
            stored = step.new_entries(row, after)
            keys = [step.exact(x[:, :, None])[0] for x in (stored, entries)]
            if not case.fp8:
                assert_close(keys[0].to(case.dtype), keys[1])
            elif DEVICE == "cuda" or not (case.norm or case.rotate):
                # What is rounded a little differently before may become the neighbouring entry.
                torch.testing.assert_close(*keys, rtol=1 / 8, atol=0.01)
            assert torch.equal(stored[1].float(), entries[1].float())
            stored.copy_(step.new_entries(row, before))
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))  # nothing else was written


@pytest.mark.parametrize("name", ["plain", "all at once", "8 bits, shares", "drafts, a window", "drafts, 8 bits"])
def test_a_layer_that_reads_another_sees_what_its_step_has_stored(name: str) -> None:
    case = CASES[name]
    step = Step(case)
    plan = DecodePlan.make(step.tables(), case.q_heads, case.kv_heads, case.head_dim)
    plan = with_entries(plan, case.entries, case.programs)
    appended, stored = step.run(plan), step.pool.clone()
    scoring = Scoring(0.3, case.window, case.softcap)
    options = (scoring, step.sinks, step.norm, step.fp8)
    place = torch.empty_like(appended)
    found = decode(step.pool, LAYER, step.q, None, None, step.rotation, plan, *options, place)
    assert found is place
    rows = [row for row, length in enumerate(case.lengths) if length]
    assert torch.equal(found[rows], appended[rows])
    assert torch.equal(step.pool.view(torch.uint8), stored.view(torch.uint8))


def with_entries(plan: DecodePlan, entries: int, programs: int) -> DecodePlan:
    """Cuts a plan to at most `entries` entries, but at least one for each row."""
    entries = max(min(plan.schedule.shape[0], entries), plan.tables.slots.shape[0])
    partial = plan.partial[:, :entries].contiguous()
    return replace(plan, schedule=plan.schedule[:entries], partial=partial, programs=programs)


def scheduled(lengths: Sequence[int], window: int | None, entries: int, programs: int) -> list[list[int]]:
    """The schedule's entries [row, split, splits, begin, end, first entry, first page] for stored `lengths`."""
    size, block = 8, decode_plan.FEW[128].block if programs <= decode_plan.PROGRAMS else decode_plan.MANY.block
    counts = [length // size + 1 for length in lengths]  # the new token's page included
    arrays = [0] * len(lengths), np.cumsum([0, *counts]), [n % size + 1 for n in lengths], [0] * sum(counts)
    tables = DeviceTables(*(torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in arrays))
    plan = with_entries(DecodePlan.make(tables, 2, 1, 16), entries, programs)
    plan.schedule.fill_(-7)
    pool = torch.empty((1, 1, 2, 1, size, 16), device=DEVICE)
    assert block % size == 0
    schedule_splits(plan, pool, Scoring(0.3, window))
    return plan.schedule[:, :7].tolist()


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    st.sampled_from([None, 1, 700]),
    st.integers(0, 20),
    st.sampled_from([100, 1000]),
)
@settings(max_examples=30, deadline=None)
def test_pieces_cover_what_a_window_shows_and_none_is_longer_than_it_must_be(
    lengths: list[int], window: int | None, spare: int, programs: int
) -> None:
    entries = len(lengths) + spare
    found = scheduled(lengths, window, entries, programs)
    assert len(found) <= entries
    used = [one for one in found if one[0] >= 0]
    assert [one[0] for one in found[len(used) :]] == [-1] * (len(found) - len(used))  # others are marked as unused
    few = programs <= decode_plan.PROGRAMS
    block = decode_plan.FEW[128].block if few else decode_plan.MANY.block
    seen = [stored - max(stored + 1 - window, 0) if window else stored for stored in lengths]
    blocks = [-(-one // block) for one in seen]
    for row, (stored, positions) in enumerate(zip(lengths, seen, strict=True)):
        pieces = [one for one in used if one[0] == row]
        assert [one[1] for one in pieces] == list(range(len(pieces)))
        assert {(one[2], one[5]) for one in pieces} == {(len(pieces), used.index(pieces[0]))}
        assert {one[6] for one in pieces} == {sum(length // 8 + 1 for length in lengths[:row])}
        edges = [one[3] for one in pieces] + [pieces[-1][4]]
        assert edges[0] == stored - positions
        assert edges[-1] == stored
        assert [one[4] for one in pieces] == edges[1:]
        assert all(end > begin for begin, end in pairwise(edges)) or positions == 0
    longest = max(-(-(one[4] - one[3]) // block) for one in used)
    rows = len(lengths)
    fewest = next(most for most in count(1) if sum(max(-(-one // most), 1) for one in blocks) <= len(found))
    mean = -(-sum(blocks) * 9 // (rows * 8))
    assert longest <= (fewest if few else max(fewest, mean))
    sizes = [max(-(-(one[4] - one[3]) // block), 1) for one in used if one[1] == 0]
    assert sizes == sorted(sizes, reverse=True)  # what runs last is short


def test_like_sequences_that_fill_a_device_are_not_split() -> None:
    found = scheduled([1000] * 6, None, 9, 1000)
    assert [one[2] for one in found if one[0] >= 0] == [1] * 6


def test_one_long_sequence_among_short_ones_is_split() -> None:
    found = scheduled([2048, *[300] * 5], None, 12, 1000)
    assert max(end - begin for row, _, _, begin, end, _, _ in found if row >= 0) < 2048 / 2
    assert sum(one[0] == 0 for one in found) >= 3


def test_a_step_of_like_rows_is_split_over_about_as_many_programs() -> None:
    def plan(rows: int, kv_heads: int) -> DecodePlan:
        tables = DeviceTables(*(torch.zeros(rows, dtype=torch.int32) for _ in range(4)))
        return DecodePlan.make(tables, 4 * kv_heads, kv_heads, 16)

    assert plan(1, 1).schedule.shape[0] == decode_plan.MAX_SPLITS
    for rows, kv_heads in ((1, 8), (2, 8), (4, 8), (16, 8), (10, 3)):
        few = plan(rows, kv_heads)
        assert decode_plan.PROGRAMS / 2 < few.programs <= decode_plan.PROGRAMS
        assert few.schedule.shape[0] == decode_plan.PROGRAMS // kv_heads
    for rows, kv_heads in ((33, 8), (64, 8), (10_000, 8)):
        assert plan(rows, kv_heads).programs == rows * kv_heads
        assert plan(rows, kv_heads).most_splits > decode_plan.SPARE
