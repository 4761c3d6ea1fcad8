"""Checks a scheduler's batches for any order of prompts, ends and decode rows, without a device, a cache or a clock."""

from dataclasses import dataclass, field
from unittest.mock import MagicMock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.transfer.completion import Signal
from tandem.transfer.wire_map import WireMap
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.prefill_request import PrefillRequest
from tandem.workers.requests.prompt import Prompt
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.finish import FinishReason, FinishRule
from tandem.workers.sampling.pending_samples import Samples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import StepBatch
from tandem.workers.scheduling.decode_rows import StepInFlight
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.scheduling.token_pace import LEAST_CHUNK, TokenPace
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation

PARAMS = SamplingParams(temperature=0)
RESERVATION = Reservation(1, 1, 1, 0, 0, 1, 0, WireMap(0, 1, 1, (), 0), 1, 1.0)  # not looked at


@dataclass(frozen=True)
class Known:
    """PendingSamples that are there."""

    samples: Samples

    def is_done(self) -> bool:
        return True

    def wait(self) -> Samples:
        return self.samples


def prompt(sequence: int, num_tokens: int, computed: int = 0, priority: int = 0) -> PrefillRequest:
    tokens = PromptSpec(np.zeros(num_tokens, np.int64), priority=priority)
    position_map = PositionMap(0, (SlotRuns.from_slots(np.arange(num_tokens, dtype=np.int32)),))
    request = PrefillRequest(
        str(sequence), sequence, tokens, PARAMS, RESERVATION, position_map, Lease(1.0), destination=MagicMock()
    )
    request.computed = computed
    return request


def sequence(number: int, max_tokens: int, prompt_tokens: int = 3, priority: int = 0) -> DecodeRequest:
    """One whose first output token, 7, is known."""
    tokens = PromptSpec(np.ones(prompt_tokens, np.int64), priority=priority)
    rule = FinishRule(frozenset(), max_tokens)
    return DecodeRequest(str(number), number, tokens, Signal(0, 1), prompt_tokens, max_tokens, PARAMS, rule, output=[7])


@dataclass
class Worker:
    """Stands for the owner of pages and device: `room` tokens of prompts fit at a time."""

    budget: int
    room: int
    scheduler: Scheduler = field(init=False)
    prompts: list[PrefillRequest] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)  # in the order of their first chunks
    finished: list[int] = field(default_factory=list)
    sequences: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.budget)

    def submit(self, num_tokens: int) -> None:
        self.sequences += 1
        request = prompt(self.sequences, num_tokens)
        self.prompts.append(request)
        self.scheduler.add(request)

    def decode(self, max_tokens: int) -> None:
        self.sequences += 1
        self.scheduler.rows.join([sequence(self.sequences, max_tokens)])

    def withdraw(self, number: int) -> None:
        unfinished = [p for p in self.prompts if p.sequence_id not in self.finished]
        if unfinished:
            gone = unfinished[number % len(unfinished)]
            self.scheduler.remove(gone)
            self.prompts.remove(gone)

    def has_room(self, request: Prompt) -> bool:
        return self._in_use() + request.num_tokens <= self.room

    def _in_use(self) -> int:
        return sum(p.num_tokens for p in self.prompts if self.scheduler.is_running(p))

    def step(self) -> StepBatch:
        for request in self.scheduler.admitted(self.has_room):
            assert self.scheduler.is_running(request)
            assert self._in_use() <= self.room
        batch = self.scheduler.next_batch()
        self._check(batch)
        if batch.decodes is not None:
            tokens = np.array(batch.decodes.positions)
            in_flight = self.scheduler.rows.launched(batch.decodes, Known(Samples(tokens, [None] * tokens.size)))
            self.scheduler.rows.learn(in_flight.pending.wait().token_ids)
        for request, length in batch.chunks:
            if request.sequence_id not in self.begun:
                self.begun.append(request.sequence_id)
            request.computed += length
            if request.computed == request.num_tokens:
                self.scheduler.remove(request)
                self.finished.append(request.sequence_id)
        return batch

    def _check(self, batch: StepBatch) -> None:
        again = self.scheduler.next_batch()
        assert (again.chunks, again.launched, again.alone) == (batch.chunks, batch.launched, batch.alone)
        rows = () if batch.decodes is None else batch.decodes.sequence_ids
        assert rows == self.scheduler.rows.sequence_ids  # a row never waits
        assert batch.num_tokens == len(rows) + sum(length for _, length in batch.chunks)
        assert batch.num_tokens <= max(self.budget, len(rows) + 1)
        ids = [*rows, *(request.sequence_id for request, _ in batch.chunks)]
        assert len(set(ids)) == len(ids)
        running = [p for p in self.prompts if self.scheduler.is_running(p)]
        chunked = [request for request, _ in batch.chunks]
        assert chunked == running[: len(chunked)]  # the first ones, in order
        assert all(length == p.num_tokens - p.computed for p, length in batch.chunks[:-1])
        assert bool(batch.chunks) == bool(running)
        assert batch.alone == (len(running) == 1 and not self.scheduler.num_waiting)


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 20)),
    st.tuples(st.just("decode"), st.integers(2, 6)),
    st.tuples(st.just("withdraw"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.just(0)),
)


def test_prompts_whose_pages_are_on_their_way_do_not_hold_up_rows() -> None:
    """Their forwards would wait, and steps after these. Without rows they begin with the layers that are there."""
    scheduler = Scheduler(64)
    coming, there = prompt(1, 9), prompt(2, 5)
    coming.arriving = True
    for each in (coming, there):
        scheduler.add(each)
    assert list(scheduler.admitted(lambda _: True)) == [coming, there]
    assert [chunk.request for chunk in scheduler.next_batch().chunks] == [coming, there]
    scheduler.rows.join([sequence(3, 4)])
    assert [chunk.request for chunk in scheduler.next_batch().chunks] == [there]
    scheduler.remove(there)
    assert not scheduler.next_batch().chunks
    coming.arriving = False
    assert [chunk.request for chunk in scheduler.next_batch().chunks] == [coming]


@settings(max_examples=200)
@given(actions=st.lists(ACTIONS, max_size=40), budget=st.integers(1, 12), room=st.integers(20, 60))
def test_any_program_keeps_budget_order_and_room(actions: list[tuple[str, int]], budget: int, room: int) -> None:
    worker = Worker(budget, room)
    for name, number in actions:
        if name == "step":
            worker.step()
        else:
            getattr(worker, name)(number)
    assert worker.begun == sorted(worker.begun)
    steps_left = sum(p.num_tokens for p in worker.prompts) + 6
    for _ in range(steps_left):  # one token of a prompt a step at least: none starves, whatever is decoded
        worker.step()
    kept = {p.sequence_id for p in worker.prompts}
    assert kept <= set(worker.finished)
    assert worker.begun == sorted(worker.begun)
    assert not worker.scheduler.num_running
    assert not worker.scheduler.num_waiting
    assert not len(worker.scheduler.rows)


def test_a_batch_holds_chunks_and_decode_rows_at_once() -> None:
    scheduler = Scheduler(max_batch_tokens=10)
    scheduler.rows.join([sequence(1, 4), sequence(2, 4)])
    first, second = prompt(3, 6), prompt(4, 6)
    scheduler.add(first)
    scheduler.add(second)
    assert list(scheduler.admitted(lambda request: True)) == [first, second]
    batch = scheduler.next_batch()
    assert batch.decodes is not None
    assert batch.decodes.sequence_ids == (1, 2)
    assert batch.chunks == ((first, 6), (second, 2))
    assert batch.num_tokens == 10
    assert not batch.alone


def test_decodes_leave_prompts_at_least_one_token() -> None:
    scheduler = Scheduler(max_batch_tokens=2)
    scheduler.rows.join([sequence(number, 9) for number in range(1, 5)])
    scheduler.add(waiting := prompt(9, 6))
    assert list(scheduler.admitted(lambda request: True)) == [waiting]
    assert scheduler.next_batch().chunks == ((waiting, 1),)


def test_a_prompt_without_room_holds_back_those_behind_it() -> None:
    scheduler = Scheduler(max_batch_tokens=10)
    long, short = prompt(1, 100), prompt(2, 1)
    scheduler.add(long)
    scheduler.add(short)
    assert list(scheduler.admitted(lambda request: request.num_tokens < 10)) == []
    assert scheduler.next_batch() == StepBatch()
    assert list(scheduler.admitted(lambda request: True)) == [long, short]


def test_a_speculative_prompt_runs_before_those_that_wait() -> None:
    scheduler = Scheduler(max_batch_tokens=10)
    scheduler.add(prompt(1, 5))
    begun, whole = prompt(2, 30, computed=10), prompt(3, 8, computed=8)
    scheduler.add(begun)
    scheduler.add(whole)
    batch = scheduler.next_batch()
    assert batch.launched == (whole,)
    assert batch.chunks == ((begun, 10),)
    assert not batch.alone
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 2)


def test_alone_is_a_prompt_that_shares_no_worker() -> None:
    scheduler = Scheduler(max_batch_tokens=10)
    scheduler.add(prompt(1, 50, computed=10))
    assert scheduler.next_batch().alone
    scheduler.add(prompt(2, 5))
    assert not scheduler.next_batch().alone


def test_a_step_keeps_its_arrays_when_rows_come_and_go() -> None:
    """A step in flight is read after the rows of the next one have changed."""
    rows = Scheduler(max_batch_tokens=10).rows
    short, long = sequence(1, 2), sequence(2, 4)
    rows.join([short, long])
    step = rows.next_step()
    assert step is not None
    assert (step.tokens.tolist(), step.sources.tolist(), step.positions.tolist()) == ([7, 7], [ON_HOST] * 2, [4, 4])
    in_flight: StepInFlight = rows.launched(step, Known(Samples(np.array([8, 9]), [None, None])))
    assert rows.sequence_ids == (2,)  # the other got its last token
    following = rows.next_step()
    assert following is not None
    assert (following.sources.tolist(), following.positions.tolist()) == ([1], [5])
    rows.leave([long])
    assert rows.next_step() is None
    assert in_flight.requests == [short, long]
    assert (step.sequence_ids, step.positions.tolist()) == ((1, 2), [4, 4])


def test_a_row_that_is_not_finite_ends_with_an_error_and_no_other_does() -> None:
    rows = Scheduler(max_batch_tokens=10).rows
    rows.join([sequence(1, 4), sequence(2, 4), sequence(3, 2)])
    samples = Samples(np.array([NOT_FINITE, 8, 9]), [None] * 3)
    step = rows.next_step()
    assert step is not None
    runs = rows.launched(step, Known(samples)).runs(samples)
    assert [run.reason for run in runs] == [FinishReason.ERROR, FinishReason.RUNNING, FinishReason.LENGTH]


def test_chunks_are_bounded_beside_rows_only() -> None:
    scheduler = Scheduler(max_batch_tokens=1000, pace=TokenPace(1.0, 1000))
    scheduler.add(waiting := prompt(9, 900))
    assert list(scheduler.admitted(lambda request: True)) == [waiting]
    assert scheduler.next_batch().chunks == ((waiting, 900),)
    scheduler.rows.join([sequence(1, 9)])
    assert scheduler.next_batch().chunks == ((waiting, LEAST_CHUNK),)
    assert scheduler.next_batch(prompts=False).chunks == ()
    assert scheduler.next_batch(prompts=False).decodes is not None


def test_rows_do_not_bound_chunks_of_prompts_with_lower_priorities() -> None:
    scheduler = Scheduler(max_batch_tokens=2000, pace=TokenPace(1.0, 2000))
    first, last = prompt(8, 900, priority=-1), prompt(9, 900)
    for waiting in (first, last):
        scheduler.add(waiting)
    assert set(scheduler.admitted(lambda request: True)) == {first, last}
    scheduler.rows.join([sequence(1, 9)])
    assert scheduler.next_batch().chunks == ((first, 900),)  # and none of `last`, whose bound is used up
    scheduler.rows.join([sequence(2, 9, priority=-1)])
    assert scheduler.next_batch().chunks == ((first, LEAST_CHUNK),)
    scheduler.remove(first)
    assert scheduler.next_batch().chunks == ((last, LEAST_CHUNK),)
