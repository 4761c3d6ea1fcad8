"""Requests that are parked while steps of others run: their copies end only when the test says so."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.cache.store.lanes import Layers
from tandem.workers.decode import parking
from tandem.workers.errors import NoRoom
from tandem.workers.sampling.finish import FinishReason
from tests.cache.late_lanes import LateLanes
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle
from tests.support.prompt_specs import spec_of
from tests.workers.decode.test_parking import HIGH, LOW, NUM_HIGH, NUM_LOW, ParkingPair
from tests.workers.loop_pair import DECODE, PREFILL

OTHER, NUM_OTHER = [5, 9, 3, 7], 20  # 3 pages of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("lanes"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[str, list[int]]:
    asked = {"low": (LOW, NUM_LOW), "high": (HIGH, NUM_HIGH), "other": (OTHER, NUM_OTHER), "low2": (LOW, NUM_LOW)}
    return {name: greedy(load_oracle(folder), *of) for name, of in asked.items()}


class LatePair(ParkingPair):
    """The decode side's copies are late."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.lanes: list[LateLanes] = []

        def make(pools: Sequence[Tensor], memory: Sequence[Tensor], layers: Layers, begins: Sequence[int]) -> LateLanes:
            self.lanes.append(LateLanes(pools, memory, layers, begins))
            return self.lanes[-1]

        super().__init__(folder, parked_lanes=make, **options)

    def end_copies(self) -> None:
        for copy in self.lanes[DECODE].made:
            copy.finish()

    @property
    def free(self) -> int:
        return self.loops[DECODE].engine.pages.free


def with_low_copied(folder: Path) -> tuple[LatePair, Any]:
    """low is being copied for high, whose call waits. other runs."""
    pair = LatePair(folder, num_pages=15)
    pair.begin("low", LOW, NUM_LOW, priority=5)
    pair.begin("other", OTHER, NUM_OTHER)
    pair.run_prefill()
    for _ in range(4):
        pair.step_decode()
    with pytest.raises(NoRoom) as caught:
        pair.begin("high", HIGH, NUM_HIGH)
    for _ in range(4):
        pair.step_decode()
    assert [request.request_id for _, request in pair.decode._parking._copying] == ["low"]
    return pair, caught.value.coming


def test_steps_of_others_run_while_pages_are_copied(folder: Path, oracle: dict[str, list[int]]) -> None:
    """The pages are free, and a resumed request has its row, when the copies are done."""
    pair, coming = with_low_copied(folder)
    free, before = pair.free, len(pair.all_tokens("other"))
    for _ in range(3):
        pair.step_decode()
    assert len(pair.all_tokens("other")) == before + 3
    assert (pair.free, coming.done(), pair.parked) == (free, False, [])
    with pytest.raises(NoRoom):
        pair.begin("high", HIGH, NUM_HIGH)
    pair.end_copies()
    pair.step_decode()
    pair.step_decode()
    assert (pair.free > free, coming.done(), pair.parked) == (True, True, ["low"])
    pair.begin("high", HIGH, NUM_HIGH)
    pair.run_prefill()
    until_rising(pair)
    before = len(pair.all_tokens("low"))
    for _ in range(3):
        pair.step_decode()
    assert len(pair.all_tokens("low")) == before
    pair.end_copies()
    pair.end_all()
    assert {name: pair.all_tokens(name) for name in ("low", "high", "other")} == {
        name: oracle[name] for name in ("low", "high", "other")
    }


def until_rising(pair: LatePair) -> None:
    for _ in range(40):
        pair.clock.now += 0.3
        pair.step_decode()
        if pair.decode._parking.rising:
            return
    raise AssertionError("nobody resumes")


@pytest.mark.parametrize("when", ["copying", "rising"])
def test_a_request_is_cancelled_while_it_is_copied(folder: Path, oracle: dict[str, list[int]], when: str) -> None:
    """Its pages are written by others only behind the copies."""
    pair, _ = with_low_copied(folder)
    if when == "rising":
        pair.end_copies()
        pair.step_decode()
        pair.step_decode()
        pair.begin("high", HIGH, NUM_HIGH)
        pair.run_prefill()
        until_rising(pair)
    assert pair.decode.abort("low", writer_quiet=True)
    assert pair.ended("low") == FinishReason.ABORT
    assert len(pair.decode._parking) == 0
    if when == "copying":
        pair.clock.now += 1
        pair.begin("high", HIGH, NUM_HIGH)
    pair.run_prefill()
    pair.end_all()
    pair.end_copies()
    assert pair.all_tokens("high") == oracle["high"]
    assert pair.all_tokens("other") == oracle["other"]


def test_a_forward_that_fails_leaves_those_alone_that_come_back(folder: Path, oracle: dict[str, list[int]]) -> None:
    pair, _ = with_low_copied(folder)
    pair.end_copies()
    pair.step_decode()
    pair.step_decode()
    pair.begin("high", HIGH, NUM_HIGH)
    pair.run_prefill()
    until_rising(pair)
    pair.decode._fail_all(RuntimeError("a kernel"))
    assert pair.ended("low") is None
    pair.end_copies()
    pair.end_all()
    assert pair.all_tokens("low") == oracle["low"]


def test_no_more_is_copied_at_once_than_the_bound(
    folder: Path, oracle: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request leaves its pages alone until the one before is copied."""
    monkeypatch.setattr(parking, "MOST_BYTES", 1)
    pair = LatePair(folder, num_pages=16)
    for name in ("low", "low2"):
        pair.begin(name, LOW, NUM_LOW, priority=5)
    pair.run_prefill()
    for _ in range(3):
        pair.step_decode()
    with pytest.raises(NoRoom) as caught:
        pair.begin("high", HIGH, 70)
    for _ in range(4):
        pair.step_decode()
    assert caught.value.coming is not None
    leaving, copying = pair.decode._parking._leaving, pair.decode._parking._copying
    assert (len(leaving), len(copying)) == (1, 1)
    for _ in range(8):
        pair.end_copies()
        pair.step_decode()
    assert len(pair.parked) == 2
    for _ in range(60):
        pair.clock.now += 0.3
        pair.step_decode()
        pair.end_copies()
    pair.end_all()
    assert [pair.all_tokens(name) for name in ("low", "low2")] == [oracle["low"]] * 2


def with_a_prompt_for_the_other_worker(pair: LatePair) -> None:
    """It has one of the decode side's sequences."""
    back = pair.loops[PREFILL].decodes.prepare("back", spec_of(OTHER), NUM_OTHER, DECODE)
    pair.loops[DECODE].prefills.submit("back", spec_of(OTHER), pair.params(NUM_OTHER), back)
    pair.loops[DECODE].prefills.upkeep()


def test_a_full_cache_refuses_a_request_that_may_have_a_sequence(folder: Path) -> None:
    """The worker may have one sequence, and its cache has two: one is copied, one is a prompt's for a peer."""
    pair = LatePair(folder, num_pages=40, most=1, max_sequences=(64, 2))
    pair.run_low()
    pair.begin("high", HIGH, NUM_HIGH)
    pair.step_decode()
    pair.decode.abort("high", writer_quiet=True)
    with_a_prompt_for_the_other_worker(pair)
    with pytest.raises(NoRoom, match="max_sequences is 2"):
        pair.begin("high again", HIGH, NUM_HIGH)


def test_what_it_replaced_does_not_come_back_before_a_request_that_a_full_cache_refused(folder: Path) -> None:
    pair = LatePair(folder, num_pages=40, most=1, max_sequences=(64, 2))
    pair.run_low()
    with_a_prompt_for_the_other_worker(pair)
    with pytest.raises(NoRoom, match="max_sequences is 2"):
        pair.begin("high", HIGH, NUM_HIGH)
    for _ in range(6):
        pair.step_decode()
        pair.end_copies()
    assert pair.parked == ["low"]
    pair.begin("high", HIGH, NUM_HIGH)
