from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer import copy_plan
from tandem.transfer.copy_plan import SOURCE, CopyPlan, plan_copy

PAGE, NUM_SLOTS = 4, 144


@pytest.fixture(params=["native", "numpy"], autouse=True, scope="module")
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "native":
            assert load_library(SOURCE) is not None
        else:
            patch.setattr(copy_plan, "load_page_runs", lambda: None)
        yield


def pairs(plan: CopyPlan) -> list[tuple[int, int]]:
    result = list(zip(plan.source_slots.tolist(), plan.target_slots.tolist(), strict=True))
    for source, target, count in zip(plan.source_pages, plan.target_pages, plan.num_pages, strict=True):
        result += [(int(source) * PAGE + i, int(target) * PAGE + i) for i in range(int(count) * PAGE)]
    return sorted(result)


def naive_whole_pages(source: np.ndarray, target: np.ndarray) -> int:
    """How many whole pages one finds by looking at every position."""
    found, i = 0, 0
    while i + PAGE <= len(source):
        ahead = np.arange(PAGE)
        whole = source[i] % PAGE == target[i] % PAGE == 0
        if (
            whole
            and (source[i : i + PAGE] == source[i] + ahead).all()
            and (target[i : i + PAGE] == target[i] + ahead).all()
        ):
            found, i = found + 1, i + PAGE
        else:
            i += 1
    return found


segment = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))


@settings(max_examples=100, deadline=None)
@given(st.lists(segment, max_size=8))
def test_a_plan_covers_each_pair_once_and_finds_every_whole_page(segments: list[tuple[int, int, int]]) -> None:
    source = np.concatenate([np.arange(s, s + n) for s, _, n in segments] or [[]]).astype(np.int32)
    target = np.concatenate([np.arange(t, t + n) for _, t, n in segments] or [[]]).astype(np.int32)
    plan = plan_copy(source, target, PAGE, NUM_SLOTS)
    assert pairs(plan) == sorted(zip(source.tolist(), target.tolist(), strict=True))
    assert plan.num_pages.sum() == naive_whole_pages(source, target)
    for array in (plan.source_pages, plan.target_pages, plan.num_pages, plan.source_slots, plan.target_slots):
        assert array.dtype == np.int32


def test_consecutive_pages_make_one_run() -> None:
    plan = plan_copy(np.arange(2, 42, dtype=np.int32), np.arange(102, 142, dtype=np.int32), PAGE, NUM_SLOTS)
    assert (plan.source_pages.tolist(), plan.target_pages.tolist(), plan.num_pages.tolist()) == ([1], [26], [9])
    assert plan.source_slots.tolist() == [2, 3, 40, 41]


def test_runs_of_whole_pages_end_where_either_side_breaks() -> None:
    """All goes as whole pages, which C finds: source pages 5 6 7 9 10 3, target pages 1 2 4 5 6 7."""
    source, target = (
        np.array([page * PAGE + i for page in pages for i in range(PAGE)], np.int32)
        for pages in ([5, 6, 7, 9, 10, 3], [1, 2, 4, 5, 6, 7])
    )
    plan = plan_copy(source, target, PAGE, NUM_SLOTS)
    assert plan.source_pages.tolist() == [5, 7, 9, 3]
    assert plan.target_pages.tolist() == [1, 4, 5, 7]
    assert plan.num_pages.tolist() == [2, 1, 2, 1]
    assert plan.source_slots.size == plan.target_slots.size == 0


def test_c_finds_whole_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    if copy_plan.load_page_runs() is None:
        pytest.skip("numpy's turn")
    monkeypatch.setattr(copy_plan, "_runs", None)
    plan = plan_copy(np.arange(8, 22, dtype=np.int32), np.arange(0, 14, dtype=np.int32), PAGE, NUM_SLOTS)
    assert (plan.source_pages.tolist(), plan.target_pages.tolist(), plan.num_pages.tolist()) == ([2], [0], [3])
    assert (plan.source_slots.tolist(), plan.target_slots.tolist()) == ([20, 21], [12, 13])


def test_slots_of_a_page_in_another_order_go_slot_by_slot() -> None:
    plan = plan_copy(np.array([8, 9, 11, 10], np.int32), np.array([4, 5, 7, 6], np.int32), PAGE, NUM_SLOTS)
    assert plan.num_pages.size == 0
    assert plan.source_slots.tolist() == [8, 9, 11, 10]


def test_pages_at_another_offset_go_slot_by_slot() -> None:
    plan = plan_copy(np.arange(0, 16, dtype=np.int32), np.arange(1, 17, dtype=np.int32), PAGE, NUM_SLOTS)
    assert plan.num_pages.size == 0
    assert plan.target_slots.tolist() == list(range(1, 17))


@pytest.mark.parametrize("outside", [-1, NUM_SLOTS, -(2**31)])
@pytest.mark.parametrize("at", [0, 3, 5, 8, 9], ids="slot {}".format)
def test_slots_outside_a_pool_are_refused(outside: int, at: int) -> None:
    """The copy has two whole pages and two slots more."""
    good, bad = np.arange(10, dtype=np.int32), np.arange(20, 30, dtype=np.int32)
    bad[at] = outside
    with pytest.raises(InvalidArgument, match=rf"source_slots are .*{outside}"):
        plan_copy(bad, good, PAGE, NUM_SLOTS)
    with pytest.raises(InvalidArgument, match=rf"target_slots are .*{outside}"):
        plan_copy(good, bad, PAGE, NUM_SLOTS)


def test_whole_pages_behind_a_pool_are_refused() -> None:
    inside, behind = np.arange(PAGE, dtype=np.int32), np.arange(NUM_SLOTS, NUM_SLOTS + PAGE, dtype=np.int32)
    with pytest.raises(InvalidArgument, match=f"target_slots are {NUM_SLOTS} … "):
        plan_copy(inside, behind, PAGE, NUM_SLOTS)
    assert plan_copy(inside, behind - PAGE, PAGE, NUM_SLOTS).num_pages.tolist() == [1]


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"source_slots has shape \(3,\)"):
        plan_copy(np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32), PAGE, NUM_SLOTS)
