"""Checks the order of prompts with targets for their first token, without a clock."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.requests.prompt import Prompt
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling import prompt_order
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.scheduling.prompt_order import AGAIN_SECONDS, PromptOrder, _Entry, in_time
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.prompt_spec import EncoderPrompt, PromptSpec
from tests.support.fixed_rate import FixedRate
from tests.workers.scheduling.test_scheduler import sequence

RATE = 100.0  # tokens a second
BUDGET = 10  # tokens of a step
AGED = 8  # steps, of which one is for late prompts and those without a target


class Waiting(Prompt):
    """Has no room when it comes."""

    @property
    def has_room(self) -> bool:
        return False


class Local(Prompt):
    @property
    def has_room(self) -> bool:
        return True


def prompt(
    name: str,
    tokens: int,
    left: float | None,
    *,
    now: float = 0.0,
    encoder: int = 0,
    kind: type[Prompt] = Waiting,
    priority: int = 0,
) -> Prompt:
    """left: seconds of its target, from now on; None: it has none."""
    spec = PromptSpec(np.zeros(tokens, np.int64), encoder=EncoderPrompt(encoder, encoder), priority=priority)
    params = SamplingParams(first_token_seconds=left)
    return kind(name, 0, spec, params, destination=None, arrived=now)  # type: ignore[arg-type]


class Steps:
    """Runs a scheduler whose prompts take RATE. room: prompts that fit at a time."""

    def __init__(self, budget: int = BUDGET, room: int = 1 << 20, rate: float = RATE) -> None:
        self.pace = FixedRate(budget, rate)
        self.scheduler = Scheduler(budget, self.pace)
        self.room = room
        self.now = 0.0
        self.ended: list[str] = []
        self.ended_at: dict[str, float] = {}

    def add(self, *prompts: Prompt) -> None:
        for one in prompts:
            self.scheduler.add(one)

    def step(self) -> list[tuple[str, int]]:
        """The chunks."""
        scheduler = self.scheduler
        scheduler.order(self.now)
        for _ in scheduler.admitted(lambda one: scheduler.num_running < self.room):
            pass
        batch = scheduler.next_batch()
        assert batch == scheduler.next_batch()
        running = scheduler.num_running
        assert batch.alone == (running == 1 and not scheduler.num_waiting)
        assert bool(batch.chunks) == bool(running)
        assert len({id(one) for one, _ in batch.chunks}) == len(batch.chunks)
        self.now += batch.prompt_tokens / RATE
        for one, length in batch.chunks:
            one.computed += length
            if one.computed == one.num_tokens:
                scheduler.remove(one)
                self.ended.append(one.request_id)
                self.ended_at[one.request_id] = self.now
        return [(one.request_id, length) for one, length in batch.chunks]

    def run(self) -> list[str]:
        """The prompts in the order of their ends."""
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()
        return self.ended


def test_a_short_prompt_passes_a_long_one_between_two_chunks() -> None:
    steps = Steps()
    steps.add(prompt("long", 100, 3.0))
    assert steps.step() == [("long", 10)]
    steps.add(prompt("short", 5, 0.5, now=steps.now))
    assert steps.step() == [("short", 5), ("long", 5)]
    assert steps.run() == ["short", "long"]


def test_the_earliest_deadline_goes_first_then_prompts_without_a_target_then_late_ones() -> None:
    steps = Steps(budget=1000)
    steps.add(
        prompt("late", 10, -1.0),
        prompt("none", 10, None),
        prompt("hopeless", 500, 1.0),
        prompt("second", 10, 0.9),
        prompt("none, too", 10, None),
        prompt("first", 10, 0.5),
    )
    assert [name for name, _ in steps.step()] == ["first", "second", "none", "none, too", "late", "hopeless"]


def test_a_long_prompt_waits_where_several_short_ones_come_in_time_instead() -> None:
    steps = Steps()
    steps.add(prompt("long", 60, 0.7), prompt("a", 20, 0.8), prompt("b", 20, 0.8))
    assert steps.run() == ["a", "b", "long"]
    assert steps.ended_at["b"] <= 0.8


def test_what_was_computed_counts_for_a_prompt() -> None:
    """It has less left than a shorter one that came later."""
    steps = Steps()
    steps.add(prompt("long", 60, 0.7))
    for _ in range(5):
        steps.step()
    steps.add(prompt("other", 30, 0.3, now=steps.now))
    assert steps.run() == ["long", "other"]


def test_a_prompt_that_cannot_be_in_time_any_more_gives_way() -> None:
    steps = Steps(rate=10 * RATE)  # more than there is
    steps.add(prompt("optimist", 100, 0.4), prompt("realist", 30, 1.0))
    for _ in range(5):
        steps.step()
    steps.pace.rate = RATE
    assert steps.step()[0][0] == "realist"


def test_without_targets_prompts_are_computed_as_they_came() -> None:
    steps = Steps()
    steps.add(prompt("a", 35, None), prompt("b", 5, None), prompt("c", 12, None))
    assert steps.run() == ["a", "b", "c"]


def test_the_order_of_arrival_is_back_once_the_last_target_has_gone() -> None:
    steps = Steps()
    steps.add(prompt("a", 40, None), prompt("due", 10, 1.0), prompt("b", 10, None))
    assert steps.step() == [("due", 10)]
    assert steps.step() == [("a", 10)]
    steps.add(prompt("c", 5, None))
    assert steps.run() == ["due", "a", "b", "c"]


def test_prompts_come_and_go_between_two_orders() -> None:
    """A request may come or end before the next step."""
    steps = Steps()
    gone, stays = prompt("gone", 20, 1.0), prompt("stays", 20, 2.0)
    steps.add(gone, stays)
    steps.step()
    steps.scheduler.remove(gone)
    steps.scheduler.remove(gone)
    steps.add(prompt("came", 20, None, kind=Local), prompt("comes", 20, 0.5, kind=Local))
    batch = steps.scheduler.next_batch()
    assert [one.request_id for one, _ in batch.chunks] == ["stays"]
    assert sorted(steps.run()) == ["came", "comes", "stays"]


@pytest.mark.parametrize("left", [None, -1.0], ids=["no target", "late"])
@pytest.mark.parametrize("room", [1, 2, 1 << 20])
def test_others_get_one_token_in_eight_whatever_comes(left: float | None, room: int) -> None:
    """The oldest other prompt ends within a bounded number of steps, and later ones in their order."""
    steps, tokens = Steps(room=room), 30
    steps.add(*(prompt(f"old {number}", tokens, left) for number in range(3)))
    counts: dict[str, int] = {}
    number = 0
    for number in range(1, 1000):
        steps.add(prompt(f"new {number}", BUDGET, 0.3, now=steps.now))
        steps.step()
        for name in steps.ended:
            counts.setdefault(name, number)
        if "old 2" in counts:
            break
    old = [counts[f"old {number}"] for number in range(3)]
    each = AGED * tokens // BUDGET
    assert all(ended <= (index + 1) * each + AGED for index, ended in enumerate(old)), old
    in_time = [name for name in steps.ended if name.startswith("new")]
    if room > 2:  # else they keep others waiting for room
        assert len(in_time) >= number * 6 // 8
        assert old[2] > 2 * each, "no more than their share"


def test_late_prompts_and_those_without_a_target_share_as_they_came() -> None:
    steps = Steps()
    steps.add(prompt("late", 20, -1.0), prompt("none", 20, None), prompt("late, too", 20, -2.0))
    while len([name for name in steps.ended if not name.startswith("new")]) < 3:
        steps.add(prompt(f"new {steps.now}", BUDGET, 0.3, now=steps.now))
        steps.step()
    assert [name for name in steps.ended if not name.startswith("new")] == ["late", "none", "late, too"]


def test_what_becomes_free_is_for_the_prompt_whose_turn_it_was() -> None:
    steps = Steps(room=1)
    steps.add(prompt("a", 40, None), prompt("b", 10, None))
    steps.step()
    assert steps.scheduler.lacks_room
    first = prompt("first", 10, 2.0, now=steps.now)
    steps.add(first)
    steps.step()
    assert steps.scheduler.lacks_room
    steps.scheduler.remove(first)
    assert steps.scheduler.num_waiting == 1
    assert not steps.scheduler.lacks_room, "until the next one has asked"
    steps.step()
    assert steps.scheduler.lacks_room
    assert steps.run() == ["a", "b"]


def test_the_turn_for_room_is_that_of_the_deadline() -> None:
    steps = Steps(room=1)
    steps.add(prompt("a", 10, None))
    steps.step()
    steps.add(prompt("b", 10, None), prompt("c", 10, 2.0), prompt("d", 10, 1.0))
    assert steps.run() == ["a", "d", "c", "b"]


def test_an_encoders_prompt_is_computed_as_a_whole_when_its_turn_comes() -> None:
    steps = Steps()
    steps.add(prompt("text", 25, 1.0), prompt("encoder", 18, 2.0, encoder=16))
    assert [steps.step() for _ in range(3)] == [[("text", 10)], [("text", 10)], [("text", 5)]]
    assert steps.step() == [("encoder", 16)]


def test_beside_rows_fewer_prompts_can_be_in_time() -> None:
    scheduler = Scheduler(1000, FixedRate(1000, 10_000.0, beside=640.0))
    long, short = prompt("long", 600, 0.7), prompt("short", 300, 0.8)
    for one in (long, short):
        scheduler.add(one)
    scheduler.order(0.0)
    assert list(scheduler.admitted(lambda _: True)) == [long, short]
    assert scheduler.next_batch().chunks[0].request is long
    assert isinstance(scheduler.rows, DecodeRows)
    scheduler.rows.join([sequence(1, 9)])
    scheduler.order(0.1)
    assert scheduler.next_batch().chunks[0].request is short


def test_the_rate_is_asked_for_where_turns_are_told_anew() -> None:
    order, asked = PromptOrder(), []

    def rate() -> float:
        asked.append(None)
        return RATE

    order.add(prompt("none", 10, None))
    order.update(0.0, rate)
    assert not asked
    order.add(prompt("due", 10, 1.0))
    for now in (0.0, 0.001, 0.004):
        order.update(now, rate)
    assert len(asked) == 1
    order.update(AGAIN_SECONDS, rate)
    assert len(asked) == 2


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each plan had; at most 8."""
    counts: list[int] = []

    def counted(dated: Sequence[_Entry], now: float, rate: float) -> dict[Prompt, None]:
        counts.append(len(dated))
        return in_time(dated, now, rate)

    monkeypatch.setattr(prompt_order, "MOST_PLANNED", 8)
    monkeypatch.setattr(prompt_order, "in_time", counted)
    return counts


def test_a_plan_has_a_bounded_number_of_prompts(planned: list[int]) -> None:
    steps = Steps()
    steps.add(*(prompt(str(number), 1 + number % 7, 0.5 + number / 10) for number in range(100)))
    steps.run()
    assert max(planned) == 8
    assert len(steps.ended) == 100


def test_a_burst_is_looked_through_within_a_few_plans(planned: list[int]) -> None:
    """Its short prompts come in time, wherever they stand in it."""
    steps = Steps()
    steps.add(*(prompt(f"long {number}", 40, 2.0) for number in range(20)))
    steps.add(*(prompt(f"short {number}", 10, 2.0) for number in range(6)))
    steps.run()
    assert max(planned) == 8
    assert all(steps.ended_at[f"short {number}"] <= 2.0 for number in range(6))


def test_later_deadlines_than_planned_go_before_prompts_without_one(planned: list[int]) -> None:
    steps = Steps()
    steps.add(prompt("none", 10, None))
    steps.add(*(prompt(str(number), 10, 10.0 + number) for number in range(20)))
    for _ in range(12):
        steps.step()
    assert [name for name in steps.ended if name != "none"] == [str(number) for number in range(11)]


JOBS = st.lists(st.tuples(st.integers(1, 30), st.floats(0.0, 1.5)), min_size=1, max_size=7)


def feasible(jobs: Sequence[tuple[int, float]]) -> bool:
    """Checks jobs in the order of deadlines, which is the best order of jobs that are all to be in time."""
    end = 0.0
    for tokens, deadline in sorted(jobs, key=lambda job: job[1]):
        end += tokens / RATE
        if end > deadline:
            return False
    return True


@given(jobs=JOBS)
def test_the_most_prompts_come_in_time(jobs: list[tuple[int, float]]) -> None:
    """They are as many as in the best of all choices."""
    entries = sorted(
        _Entry(deadline, number, tokens, prompt(str(number), tokens, None))
        for number, (tokens, deadline) in enumerate(jobs)
    )
    chosen = [int(one.request_id) for one in in_time(entries, 0.0, RATE)]
    assert feasible([jobs[number] for number in chosen])
    assert chosen == [entry.number for entry in entries if entry.number in chosen]
    more = combinations(jobs, len(chosen) + 1) if len(chosen) < len(jobs) else ()
    assert not any(feasible(others) for others in more)


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 40), st.one_of(st.none(), st.floats(-1, 3))),
    st.tuples(st.just("local"), st.integers(1, 40), st.one_of(st.none(), st.floats(-1, 3))),
    st.tuples(st.just("remove"), st.integers(0, 9), st.none()),
    st.tuples(st.just("step"), st.just(0), st.none()),
)


@settings(max_examples=200)
@given(actions=st.lists(ACTIONS, max_size=60), room=st.integers(1, 5), most=st.sampled_from((1, 3, 256)))
def test_any_program_ends_all_its_prompts(actions: list[tuple[str, int, float | None]], room: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_order, "MOST_PLANNED", most)
        _end_all_prompts(actions, room)


def _end_all_prompts(actions: list[tuple[str, int, float | None]], room: int) -> None:
    steps, there = Steps(room=room), []
    for name, number, left in actions:
        if name in ("add", "local"):
            one = prompt(str(len(there)), number, left, now=steps.now, kind=Local if name == "local" else Waiting)
            there.append(one)
            steps.add(one)
        elif name == "step":
            steps.step()
        elif number < len(there) and there[number].request_id not in steps.ended:
            steps.scheduler.remove(there[number])
            there[number].request_id = "gone"
    for _ in range(sum(one.num_tokens for one in there) + 1):
        if steps.scheduler.num_running or steps.scheduler.num_waiting:
            steps.step()
    kept = {one.request_id for one in there} - {"gone"}
    assert kept == set(steps.ended)
    order = steps.scheduler._order
    assert not any((order._entries, order._undated, order._dated, order._past, order._late, order._timely))
    assert order._again == -math.inf


@pytest.mark.parametrize("kind", [Waiting, Local])
def test_lower_priorities_go_first_and_what_waits_rises(kind: type[Prompt]) -> None:
    """A priority is 30 s by default, and the steps take one second each."""
    steps = Steps(room=1)
    steps.add(
        prompt("last", 10, None, kind=kind, priority=9),
        prompt("none", 10, None, kind=kind),
        prompt("timely", 10, 100.0, kind=kind),
        prompt("first", 10, None, kind=kind, priority=-1),
        prompt("first, timely", 10, 100.0, kind=kind, priority=-1),
    )
    assert steps.run() == ["first, timely", "first", "timely", "none", "last"]
    steps = Steps(room=1)
    steps.add(prompt("old", 10, None, now=-280.0, kind=kind, priority=9), prompt("new", 10, None, kind=kind))
    steps.add(prompt("before", 10, None, kind=kind, priority=-1))
    assert steps.run() == ["before", "old", "new"]


def test_beside_a_more_urgent_prompt_others_get_a_small_part_of_a_batch() -> None:
    """Without one, prompts of any priority get a whole batch."""
    steps = Steps(budget=640)
    low, high = prompt("low", 1000, None), prompt("high", 50, None, priority=-1)
    steps.add(low, prompt("low too", 1000, None))
    assert steps.step() == [("low", 640)]
    steps.add(high)
    assert steps.step() == [("high", 50), ("low", 10)]
    assert steps.step() == [("low", 350), ("low too", 290)]


def test_beside_more_urgent_prompts_others_get_a_token_of_a_small_batch() -> None:
    """Else short urgent prompts in each step would leave them nothing."""
    steps = Steps(budget=32)
    steps.add(prompt("low", 1000, None))
    for name in "abc":
        steps.add(prompt(name, 20, None, priority=-1))
        assert steps.step() == [(name, 20), ("low", 1)]


def test_a_more_urgent_prompt_does_not_wait_for_the_pages_of_another() -> None:
    """Rows that pause for it would wait for them, too."""
    steps = Steps(budget=640)
    arriving, low, high = (
        prompt(name, 1000, None, priority=at) for at, name in ((5, "arriving"), (5, "low"), (0, "high"))
    )
    steps.add(arriving, low, high)
    arriving.arriving = True
    assert steps.step() == [("high", 640)]
    assert steps.step() == [("high", 360), ("low", 10)]
    assert steps.step() == [("arriving", 640)]


def test_beside_a_prompt_that_is_first_by_its_wait_others_get_what_is_left() -> None:
    steps = Steps(budget=160)
    steps.add(prompt("old", 10, None, now=-280.0, priority=8), prompt("new", 20, None), prompt("next", 1000, None))
    assert steps.step() == [("old", 10), ("new", 20), ("next", 130)]
