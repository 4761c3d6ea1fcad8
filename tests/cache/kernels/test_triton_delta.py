"""Kernels of a gated delta rule against torch's, which are their reference: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

pytest.importorskip("triton")

from tandem.cache.attention.states import look_up_states
from tandem.cache.kernels.base import DeviceTables, GroupPlan, Limits
from tandem.cache.kernels.delta.chunk_rows import Cuts, lay_out_chunks
from tandem.cache.kernels.delta.chunks import LEVELS
from tandem.cache.kernels.delta.kernels import DeltaRuns, TritonDeltaKernels
from tandem.cache.kernels.delta.solve import invert_unit_lower
from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, RecurrentInputs, SsdShape, StateShape
from tandem.cache.kernels.torch.delta_rule import CHUNK, unit
from tandem.cache.kernels.torch.recurrent import TorchStateKernels
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.plan.tables import NO_WRITES, PageTables, StateWrites, TokenLayout, lay_out_tokens, look_up_pages
from tests.cache.kinds.test_recurrent import SHAPE
from tests.cache.kinds.test_recurrent import test_random_programs_equal_naive_states as run_random_program
from tests.cache.kinds.test_state_snapshots import Program, island_of
from tests.cache.kinds.test_state_snapshots import test_drafts_are_taken_out_of_states as run_drafts
from tests.support.tolerances import Tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER, PAGES = 2, 1, 12
ODD = DeltaShape(key_heads=1, value_heads=2, key_dim=5, value_dim=3, tail=3)
TOLERANCES = {torch.float32: Tolerance(1e-4, 1e-5), torch.float16: Tolerance(1e-2, 1e-2)}


@dataclass(frozen=True)
class Case:
    """before: positions that each sequence has; after: its new ones. snapshots: pairs of a sequence and the number
    of new tokens after which it leaves one. decay: of how much a token lets a state decay."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    shape: StateShape = ODD
    dtype: torch.dtype = torch.float32
    snapshots: tuple[tuple[int, int], ...] = ()
    decay: float = 0.1

    def writes(self) -> StateWrites:
        """Returns writes to pages that no sequence has."""
        if not self.snapshots:
            return NO_WRITES
        sequences, tokens = np.array(self.snapshots).T
        return StateWrites(sequences, tokens, np.arange(PAGES, PAGES + sequences.size))


KDA = KdaShape(key_heads=2, value_heads=2, key_dim=24, value_dim=40, tail=2)
SSD = SsdShape(num_heads=4, groups=2, head_dim=40, state_size=24, tail=2)
WIDE = DeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=40, tail=2)
CASES = {
    "single tokens": Case((7, 0, 1), (1, 1, 1)),
    "mixed": Case((0, 9, 3, 0), (65, 1, 2, 1)),
    "a chunk": Case((4,), (CHUNK,)),
    "borders": Case((0, 1, 0, 5, 2), (63, 64, 65, 128, 2)),
    "values in parts": Case((3, 0, 4), (1, 66, 3), WIDE),
    "a longer tail than a chunk": Case((0, 6, 1), (4, 2, 1), replace(ODD, tail=7)),
    "Qwen3-Next's heads": Case(
        (2, 3), (70, 1), DeltaShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128, tail=3)
    ),
    "snapshots": Case((0, 9, 2, 5, 0), (70, 1, 3, 1, 64), WIDE, snapshots=((0, 16), (0, 65), (1, 1), (2, 1), (4, 64))),
    "snapshots in the tail": Case(
        (0, 4, 1), (3, 5, 1), replace(ODD, tail=7), snapshots=((0, 1), (0, 3), (1, 2), (1, 4), (2, 1))
    ),
    "16 bits": Case((0, 9, 3), (65, 1, 2), replace(WIDE, tail=3), torch.float16),
    "KDA": Case((0, 9, 3), (70, 1, 2), KDA, snapshots=((0, 16), (1, 1), (2, 2))),
    "KDA, borders": Case((0, 1, 5), (63, 65, 128), KDA, decay=2),
    "KDA in 16 bits": Case((0, 9, 3), (65, 1, 2), KDA, torch.float16),
    "KDA that forgets": Case((3, 4), (70, 1), KDA, decay=60),
    "Mamba-2": Case((0, 9, 3), (70, 1, 2), SSD, snapshots=((0, 16), (1, 1), (2, 2))),
    "Mamba-2, borders": Case((0, 1, 5), (63, 65, 128), replace(SSD, groups=1), decay=2),
    "Mamba-2 in 16 bits": Case((0, 9, 3), (65, 1, 2), SSD, torch.float16),
    "Mamba-2 that forgets": Case((3, 4), (70, 1), SSD, decay=60),
}


def draw(case: Case, *shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, case.dtype)


def draw_inputs(case: Case, num_tokens: int, seed: int = 0) -> RecurrentInputs:
    """Keys that are much alike, so that the inverse of a chunk is not near the identity. Rows of tokens lie apart."""
    shape = case.shape
    mixed = draw(case, num_tokens, shape.channels + 3, seed=seed)[:, :-3] + draw(case, shape.channels, seed=9)
    conv = draw(case, shape.channels, shape.tail + 1, seed=8)
    log_decay = draw(case, num_tokens, *shape.decays, seed=seed + 1).float()
    strength = draw(case, num_tokens, shape.heads, seed=seed + 2).float().sigmoid().to(case.dtype).float()
    bias, skip = None, None
    if isinstance(shape, SsdShape):
        bias, skip = draw(case, shape.channels, seed=7), draw(case, shape.heads, seed=6).float()
    return RecurrentInputs(mixed, conv, -case.decay * log_decay.abs(), strength, bias, skip)


def lay_out(case: Case) -> tuple[TokenLayout, PageTables]:
    tokens = lay_out_tokens(np.array(case.before), np.array(case.after))
    pages = np.random.default_rng(0).permutation(PAGES)[: len(case.before), None].astype(np.int32)
    rows = np.arange(len(case.before))
    tables = look_up_states(lambda rows, entries: look_up_pages(pages, rows, entries, 1), rows, tokens)
    return tokens, replace(tables, writes=case.writes())


def both(case: Case, tables: PageTables) -> tuple[TorchStateKernels, TritonDeltaKernels]:
    """Makes both backends over equal pools. They are NaN except in the pages of sequences that go on, whose tails are
    numbers of the model's dtype. The reference is on a CPU."""
    numbers, there = case.shape.numbers, np.array(case.before) > 0
    pool = torch.full((PAGES + len(case.snapshots), LAYERS, 1, 1, 1, numbers), torch.nan)
    for page in tables.kv_indices[there].tolist():
        pool[page] = draw(case, *pool.shape[1:], seed=page).float().cpu()
    return TorchStateKernels(pool, case.shape), TritonDeltaKernels(pool.clone().to(DEVICE), case.shape)


def on_cpu(x: RecurrentInputs) -> RecurrentInputs:
    return RecurrentInputs(*(None if tensor is None else tensor.cpu() for tensor in x))  # type: ignore[arg-type]


def assert_same(case: Case, found: Tensor, expected: Tensor) -> None:
    """NaN where NaN is. Sums may cancel: so errors are also taken relative to the largest number."""
    tolerance, largest = TOLERANCES[case.dtype], float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(
        found.cpu().double(),
        expected.double(),
        rtol=tolerance.rtol,
        atol=tolerance.atol * max(1, largest),
        equal_nan=True,
    )


@pytest.mark.gate("single tokens", "mixed", "a longer tail*", "snapshots*", "16 bits", "KDA", "Mamba-2")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_both_backends_compute_alike(case: Case) -> None:
    """Also computes the next single tokens, from what the forward has left. Nothing else in a pool changes."""
    tokens, tables = lay_out(case)
    reference, kernels = both(case, tables)
    x = draw_inputs(case, int(tokens.qo_indptr[-1]))
    check_forward(case, reference, kernels, tokens, tables, x)
    behind = tuple(np.add(case.before, case.after).tolist())
    further = replace(case, before=behind, after=(1,) * len(case.after), snapshots=())
    tokens, tables = lay_out(further)
    check_forward(case, reference, kernels, tokens, tables, draw_inputs(case, len(case.after), seed=4))


def check_forward(
    case: Case,
    reference: TorchStateKernels,
    kernels: TritonDeltaKernels,
    tokens: TokenLayout,
    tables: PageTables,
    x: RecurrentInputs,
) -> None:
    calls: list[Any] = []
    expected = reference.run(GroupPlan(reference.plan(tokens, tables), None), LAYER, on_cpu(x))
    found = kernels.run(GroupPlan(kernels.plan(tokens, tables), None), LAYER, x, lambda *kv: calls.append(kv))
    assert found.dtype == expected.dtype == case.dtype
    assert calls == [(None, None)]
    assert_same(case, found, expected)
    assert_same(case, kernels._pool, reference._entries.view(kernels._pool.shape))


STEPS = {
    "single tokens": replace(CASES["single tokens"], snapshots=((0, 1), (2, 1))),
    "wide": Case((5, 8), (1, 1), WIDE),
}


@pytest.mark.gate("single tokens")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS.keys())
def test_graph_buffers_leave_entries_of_others_alone(case: Case) -> None:
    """The step has two rows of padding, whose table names page 0."""
    tokens, tables = lay_out(case)
    reference, kernels = both(case, tables)
    count = len(case.before)
    x = draw_inputs(case, count)
    expected = reference.run(GroupPlan(reference.plan(tokens, tables), None), LAYER, on_cpu(x))
    own = kernels.buffers(Limits.of_step(count + 2, 4, 1), device_tables(tables, 2))
    own.begin_captured()
    found = own.run(GroupPlan(own, None, captured=True), LAYER, padded(x))
    assert_same(case, found[:count], expected)
    assert_same(case, kernels._pool, reference._entries.view(kernels._pool.shape))


RUNS = {
    "runs": Case((7, 3, 9), (4, 1, 3), snapshots=((0, 4), (1, 1), (2, 2))),
    "values in parts": Case((5, 8), (2, 5), replace(WIDE, value_dim=72)),
    "a longer tail than a run": Case((2, 9), (5, 3), replace(ODD, tail=7), snapshots=((0, 1), (0, 3), (1, 3))),
    "16 bits": Case((4, 9), (3, 5), replace(WIDE, tail=3), torch.float16, snapshots=((1, 1),)),
    "KDA": Case((7, 3, 9), (4, 1, 3), KDA, snapshots=((0, 4), (1, 1), (2, 2))),
    "Mamba-2": Case((7, 3, 9), (4, 1, 3), SSD, snapshots=((0, 4), (1, 1), (2, 2))),
}


@pytest.mark.gate("True-runs")
@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("captured", [False, True])
def test_drafts_are_taken_back(case: Case, captured: bool) -> None:
    """Each time, each sequence but the last takes back one draft less than before. captured: in graph buffers, with two
    rows of padding."""
    tokens, tables = lay_out(case)
    tables = replace(tables, drafted=True)
    reference, kernels = both(case, tables)
    own = tables.kv_indices
    spares = np.setdiff1d(np.arange(PAGES, dtype=np.int32), own)[: own.size]
    for one in (reference, kernels):
        one.copy_pages(own, spares)
    plans = reference.plan(tokens, tables), None if captured else kernels.plan(tokens, tables)
    buffers = runs_in_buffers(kernels, tokens, tables) if captured else None
    for layer in range(LAYERS):
        x = draw_inputs(case, int(tokens.qo_indptr[-1]), seed=layer)
        expected = reference.run(GroupPlan(plans[0], None), layer, on_cpu(x))
        if buffers is None:
            found = kernels.run(GroupPlan(plans[1], None), layer, x)
        else:
            found = buffers.run(GroupPlan(buffers, None, captured=True), layer, padded(x))[: expected.shape[0]]
        assert_same(case, found, expected)
    assert_same(case, kernels._pool, reference._entries.view(kernels._pool.shape))
    for sequence, (count, source, target) in enumerate(zip(case.after, spares.tolist(), own.tolist(), strict=True)):
        for held in range(count - 1, 0, -1) if sequence else range(count, 0, -1):
            for one in (reference, kernels):
                one.compute_again(sequence, held, source, target)
            assert_same(case, kernels._pool, reference._entries.view(kernels._pool.shape))


def runs_in_buffers(kernels: TritonDeltaKernels, tokens: TokenLayout, tables: PageTables) -> DeltaRuns:
    apart, of_each = tokens.apart(), tokens.owners
    of_tokens = replace(
        tables,
        slot_mapping=tables.kv_indices[of_each],
        kv_indices=tables.kv_indices[of_each],
        kv_last_page_len=(tokens.positions > 0).astype(np.int32),
        writes=tables.writes.apart(tokens),
    )
    assert apart.preceding is not None
    preceding = torch.tensor([*apart.preceding.tolist(), 0, 0], dtype=torch.int32, device=DEVICE)
    static = replace(device_tables(of_tokens, 2), preceding=preceding)
    own = kernels.buffers(Limits.of_verification(of_each.size + 2, 4, 1), static)
    assert isinstance(own, DeltaRuns)
    own.plan(apart, of_tokens)
    return own


def padded(x: RecurrentInputs) -> RecurrentInputs:
    """Adds two tokens of padding."""
    return x._replace(
        mixed=torch.cat((x.mixed, x.mixed[:2] * torch.nan)),
        log_decay=torch.cat((x.log_decay, x.log_decay[:2])),
        strength=torch.cat((x.strength, x.strength[:2])),
    )


def device_tables(tables: PageTables, padding: int) -> DeviceTables:
    def array(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    assert tables.slot_mapping.tolist() == tables.kv_indices.tolist()
    kept = np.full(len(tables.slot_mapping) + padding, -1)
    kept[tables.writes.sequences] = tables.writes.pages
    return DeviceTables(
        array([*tables.slot_mapping.tolist(), *[-1] * padding]),
        array(list(range(len(tables.slot_mapping) + padding + 1))),
        array([*tables.kv_last_page_len.tolist(), *[1] * padding]),
        array([*tables.kv_indices.tolist(), *[0] * padding]),
        kept=array(kept.tolist()),
    )


def test_entries_are_read_whole() -> None:
    case = CASES["single tokens"]
    _, tables = lay_out(case)
    reference, kernels = both(case, tables)
    slots = tables.kv_indices[[2, 0]]
    for ours, theirs in zip(kernels.read_slots(LAYER, slots), reference.read_slots(LAYER, slots), strict=True):
        assert torch.equal(ours.cpu(), theirs.view(ours.shape))


def test_chunks_of_unlike_sequences() -> None:
    pages, behind, begins, ends = np.array([[7, 3], [1, 0], [2, 67], [67, 195]])
    cuts = Cuts(*np.array([[0, 0, 1, 1], [2 + 16, 67, 67 + 64, 67 + 80], [5, 9, 0, 8]]))
    sequences, chunks = lay_out_chunks(pages, behind, begins, ends, cuts)
    assert sequences.tolist() == [[7, 1, 2, 67, 0, 2], [3, 0, 67, 195, 2, 5]]
    of_first, of_second = [[2, 18, 5], [18, 67, 9]], [[67, 131, 0], [131, 147, 8], [147, 195, -1]]
    assert chunks.tolist() == [[0, *one] for one in of_first] + [[1, *one] for one in of_second]


def test_sequences_without_snapshots_are_cut_by_chunks_alone() -> None:
    pages, behind, begins, ends = np.array([[7, 3], [1, 0], [2, 67], [67, 195]])
    sequences, chunks = lay_out_chunks(pages, behind, begins, ends, Cuts(*np.empty((3, 0), np.int64)))
    assert sequences[:, 4:].tolist() == [[0, 2], [2, 4]]
    assert chunks.tolist() == [[0, 2, 66, -1], [0, 66, 67, -1], [1, 67, 131, -1], [1, 131, 195, -1]]


@triton.jit
def _invert(strict, target, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # noqa: ANN001, ANN202
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    found = invert_unit_lower(tl.load(strict + place), SIZE, LEVELS, PRECISION)
    tl.store(target + place, found)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("kind", ["random", "all alike", "opposite"])
def test_the_inverse_of_a_chunk(kind: str, precision: str) -> None:
    """Inverts products of keys. All alike: they are one and the same, without decay; powers of such a matrix are huge.
    Opposite: each is the one before with another sign. tf32: as kernels for 16 bits compute it."""
    keys = torch.ones(CHUNK, 1)
    if kind == "random":
        keys = unit(torch.randn(CHUNK, 16, generator=torch.Generator().manual_seed(0)))
    elif kind == "opposite":
        keys[::2] = -1
    strict = keys @ keys.t()
    strict = strict.tril(-1)
    found = torch.empty_like(strict, device=DEVICE)
    kernel: Any = _invert[(1,)]
    kernel(strict.to(DEVICE), found, CHUNK, LEVELS, precision)
    expected = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + strict)
    bound = 1e-4 if precision == "ieee" else 1e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=bound, atol=bound)


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="the caches of these programs are on a CPU")
def test_random_programs_equal_naive_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs also fork, reserve and send states."""
    monkeypatch.setattr(Recurrent, "backend", lambda kind, site: TritonDeltaKernels(site.pool, kind.shape))
    run_random_program(4, True, SHAPE, monkeypatch)


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="the caches of these programs are on a CPU")
def test_random_programs_share_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs also fork and pop to snapshots, and send after prefixes."""
    monkeypatch.setattr(Recurrent, "backend", lambda kind, site: TritonDeltaKernels(site.pool, kind.shape))
    program = Program(Random(3), island_of(5, 30))
    program.run(120)
    assert all(program.done[name] for name in ("forks within", "pops within", "sent behind a prefix")), program.done


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="the caches of these programs are on a CPU")
def test_drafts_are_taken_out_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "backend", lambda kind, site: TritonDeltaKernels(site.pool, kind.shape))
    run_drafts(2)
