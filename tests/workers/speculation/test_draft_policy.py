"""Checks which steps have drafts, for batches whose tokens are known beforehand, without a model or a cache."""

from typing import NamedTuple

import numpy as np
import pytest

from tests.support.drafted_batch import DraftedBatch, Holds, speculation_of

MOST, MOST_STEP_TOKENS = 4, 32
# ms of a plain step by its rows, and what drafted tokens add, by their number: Qwen3-8B on an H200 (verify_steps)
PLAIN = ([1, 8, 32], [3.80, 4.63, 5.88])
DRAFTED = {
    False: ([1, 3, 7, 8, 24, 32, 56, 96, 224], [1.00, 0.93, 1.78, 1.73, 2.49, 2.63, 3.63, 5.69, 12.1]),
    True: ([1, 3, 7, 24, 56, 96, 224], [0.30, 0.35, 0.74, 0.62, 2.57, 1.86, 4.75]),  # of steps that follow one another
}

# of a plain step with an EAGLE-3 head, and what a draft of 3 tokens and its verify step add, by rows
HEADED = ([1, 8, 32], [3.97, 4.80, 6.10])
DRAFTED_BY_HEAD = {
    False: ([1, 8, 32], [3.96, 5.68, 9.03]),
    True: ([1, 8, 32], [0.92, 1.29, 2.64]),  # of steps that follow one another
}


class Ran(NamedTuple):
    steps: int
    verified: int
    tokens: int
    cost: float  # of drafts and of the head, in plain steps of the target alone

    @property
    def gain(self) -> float:
        """Output per time, of what it is in plain steps."""
        return self.tokens / (self.steps + self.cost)


class Batches:
    """A worker whose drafter's tokens hold, each, with a probability."""

    def __init__(
        self,
        max_step_tokens: int = MOST_STEP_TOKENS,
        *,
        follows: bool = False,
        most: int = MOST,
        computes: bool = False,
        steady: bool = True,
    ) -> None:
        """follows: verify steps can follow one another, as long as the rows stay: steady."""
        self.steady = steady
        self._speculation = speculation_of(most, max_step_tokens, follows=follows, computes=computes)
        self._follows, self._most, self._computes = follows, most, computes

    def _cost(self, rows: int, drafted: list[int]) -> float:
        """Returns the cost, in plain steps, of a step with so many drafted tokens, by sequence."""
        if self._computes:
            of_most = float(np.interp(rows, *DRAFTED_BY_HEAD[self._following]) / np.interp(rows, *PLAIN))
            return self._of_head(rows) + of_most * max(drafted) / self._most
        return float(np.interp(sum(drafted), *DRAFTED[self._following]) / np.interp(rows, *PLAIN))

    @property
    def _following(self) -> bool:
        return self._follows and self.steady

    def _of_head(self, rows: int) -> float:
        """Returns the head's cost, in plain steps, in a step in which it takes part."""
        return float(np.interp(rows, *HEADED) / np.interp(rows, *PLAIN)) - 1 if self._computes else 0.0

    def run(self, rows: int, length: int, steps: int, holds: Holds) -> Ran:
        """Runs so many sequences at a time, each of `length` tokens. tokens: of an average row."""
        batch = DraftedBatch(self._speculation, rows, length, holds, steady=self.steady)
        verified, tokens, cost = 0, 0, 0.0
        for _ in range(steps):
            drafted, alone = batch.propose(), batch.alone
            tokens += rows + sum(batch.step(drafted))
            if drafted is not None:
                verified += 1
                cost += self._cost(rows, drafted)
            elif batch.alone == alone:
                cost += self._of_head(rows)
        return Ran(steps, verified, round(tokens / rows), cost)


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 31])
@pytest.mark.parametrize("length", [40, 1000])
def test_drafts_that_never_hold_cost_little(rows: int, length: int, follows: bool) -> None:
    """Also where sequences are short, so that new ones come all the time."""
    batches = Batches(follows=follows)
    batches.run(rows, length, 200, lambda number: 0.0)
    ran = batches.run(rows, length, 1000, lambda number: 0.0)
    assert ran.verified > 0, "they are tried again"
    assert ran.gain >= 0.97


@pytest.mark.parametrize("rows", [32, 64])
def test_large_batches_draft_nothing(rows: int) -> None:
    assert Batches().run(rows, 200, 100, lambda number: 0.9).verified == 0


@pytest.mark.gate("1-*", "24-*")
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("holds", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("rows", [1, 8, 16, 24, 28, 31])
def test_no_batch_is_slower_for_its_drafts(rows: int, holds: float, follows: bool) -> None:
    assert Batches(follows=follows).run(rows, 200, 500, lambda number: holds).gain >= 0.98


@pytest.mark.gate("16-*")
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("holds", [0.0, 0.2, 0.4, 0.5, 0.7])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_no_large_step_is_slower_for_its_drafts(rows: int, holds: float, follows: bool) -> None:
    """The drafted tokens are so many that they take longer than the weights."""
    assert Batches(256, follows=follows).run(rows, 200, 500, lambda number: holds).gain >= 0.98


@pytest.mark.parametrize(
    ("rows", "gain", "follows"), [(1, 1.8, False), (4, 1.6, False), (8, 1.5, False), (1, 2.1, True), (8, 1.8, True)]
)
def test_drafts_that_mostly_hold_pay(rows: int, gain: float, follows: bool) -> None:
    assert Batches(follows=follows).run(rows, 200, 1000, lambda number: 0.7).gain >= gain


@pytest.mark.gate("1-*", "8-0.5-*")
@pytest.mark.parametrize(("follows", "gain"), [(False, 0.93), (True, 0.97)])
@pytest.mark.parametrize("holds", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_no_batch_is_much_slower_for_a_model_that_drafts(rows: int, holds: float, follows: bool, gain: float) -> None:
    batches = Batches(256, most=3, computes=True, follows=follows)
    batches.run(rows, 200, 300, lambda number: holds)
    assert batches.run(rows, 200, 1000, lambda number: holds).gain >= gain


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(("rows", "gain"), [(1, 0.97), (8, 0.97), (32, 0.98)])
def test_a_model_whose_drafts_never_hold_leaves_the_target_alone(rows: int, gain: float, follows: bool) -> None:
    batches = Batches(256, most=3, computes=True, follows=follows)
    batches.run(rows, 200, 300, lambda number: 0.0)
    ran = batches.run(rows, 200, 1000, lambda number: 0.0)
    assert ran.verified > 0, "some sequences are tried"
    assert ran.gain >= gain


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_model_drafts_again_for_new_sequences_when_its_drafts_hold(rows: int) -> None:
    batches = Batches(256, most=3, computes=True, follows=True)
    batches.run(rows, 200, 1000, lambda number: 0.0)
    batches.run(rows, 200, 200 * 20, lambda number: 0.9)
    assert batches.run(rows, 200, 300, lambda number: 0.9).gain >= 1.8


def test_a_model_whose_drafts_pay_in_a_small_batch_alone_leaves_a_large_one_alone() -> None:
    def run(rows: int) -> float:
        batches = Batches(256, most=3, computes=True, follows=True)
        batches.run(rows, 200, 300, lambda number: 0.5)
        return batches.run(rows, 200, 1000, lambda number: 0.5).gain

    assert run(1) >= 1.1
    assert run(32) >= 0.98


def test_one_sequence_without_luck_takes_nothing_from_others() -> None:
    unlucky = Batches().run(4, 200, 1000, lambda number: 0.0 if number == 0 else 0.7)
    assert unlucky.gain >= 0.95 * Batches().run(4, 200, 1000, lambda number: 0.7).gain


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_drafts_are_made_again_when_they_hold(rows: int) -> None:
    batches = Batches()
    batches.run(rows, 200, 1000, lambda number: 0.0)
    batches.run(rows, 200, 300, lambda number: 0.7)
    assert batches.run(rows, 200, 300, lambda number: 0.7).gain >= 1.4


def test_drafts_pay_sooner_where_steps_follow() -> None:
    waiting, following = (
        Batches(256, follows=follows).run(32, 200, 500, lambda number: 0.5) for follows in (False, True)
    )
    assert waiting.verified < following.verified / 10
    assert following.gain >= 1.15


@pytest.mark.gate("8-*", "32-0.7-*")
@pytest.mark.parametrize("computes", [False, True])
@pytest.mark.parametrize("holds", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("rows", [8, 32, 64])
def test_no_batch_is_slower_for_drafts_where_rows_join_and_end_all_the_time(
    rows: int, holds: float, computes: bool
) -> None:
    """Then no verify step follows another, though the device could have it so."""
    batches = Batches(256, most=3, computes=computes, follows=True, steady=False)
    batches.run(rows, 200, 300, lambda number: holds)
    ran = batches.run(rows, 200, 1000, lambda number: holds)
    assert ran.gain >= (0.95 if computes else 0.98)  # a model takes part in plain steps, too


def test_drafts_pay_again_once_rows_stay() -> None:
    batches = Batches(256, most=3, follows=True, steady=False)
    assert batches.run(64, 200, 300, lambda number: 0.7).verified < 60
    batches.steady = True
    batches.run(64, 200, 100, lambda number: 0.7)
    assert batches.run(64, 200, 300, lambda number: 0.7).verified > 270
