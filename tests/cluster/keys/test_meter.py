"""The sliding minute of a key: against a plain list of what was counted, with processes that come and go."""

import mmap
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import RateLimited
from tandem.cluster.keys import key_cells
from tandem.cluster.keys.key import Key
from tandem.cluster.keys.key_cells import WINDOW, KeyCells, Sum, Unit
from tandem.cluster.keys.meter import Charge, Meter
from tandem.cluster.peers.table import KEY_SLOTS, GatewayTable, table_bytes

PROCESSES = 3
KEY = Key("team-a", b"a" * 32, 5, 100)
OTHER = Key("team-b", b"b" * 32, 5, 100)


@dataclass
class Clock:
    now: float = 1000.25

    def __call__(self) -> float:
        return self.now


class Processes:
    """Some, which share a table."""

    def __init__(self, clock: Clock, keys: tuple[Key, ...] = (KEY, OTHER)) -> None:
        self.memory = mmap.mmap(-1, table_bytes(PROCESSES, 1))
        self.clock, self.keys = clock, keys
        self.meters = [self.begin(process) for process in range(PROCESSES)]

    def begin(self, process: int) -> dict[str, Meter]:
        """The process is there, perhaps after another of its row."""
        table = GatewayTable(self.memory, PROCESSES, 1, process)
        table.clear(process, 1)  # as the supervisor does
        cells = KeyCells(table)
        slots = cells.open({key.id for key in self.keys}, int(self.clock()))
        return {key.name: Meter(cells, slots[key.id], self.clock) for key in self.keys}


@dataclass
class Entry:
    second: int
    tokens: int
    requests: int = 1


@dataclass
class Naive:
    """What the meters should do."""

    clock: Clock
    entries: list[Entry] = field(default_factory=list)

    def used(self) -> tuple[int, int]:
        live = [one for one in self.entries if int(self.clock()) - one.second < WINDOW]
        return sum(one.requests for one in live), sum(one.tokens for one in live)

    def count(self, tokens: int) -> Entry | None:
        requests, before = self.used()
        if requests + 1 > 5 or before + tokens > 100:
            return None
        self.entries.append(Entry(int(self.clock()), tokens))
        return self.entries[-1]

    def settle(self, entry: Entry, used: int) -> None:
        if used > entry.tokens:
            self.entries.append(Entry(int(self.clock()), used - entry.tokens, 0))
        elif int(self.clock()) - entry.second < WINDOW:
            entry.tokens = used


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.1, 0.6, 1.0, 7.3, 29.5, 59.9, 60.0, 61.0, 64.0, 200.0])),
        st.tuples(st.just("count"), st.tuples(st.integers(0, PROCESSES - 1), st.integers(0, 100))),
        st.tuples(st.just("settle"), st.tuples(st.integers(0, 50), st.integers(0, 120))),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("die"), st.integers(0, PROCESSES - 1)),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_a_minute_is_what_a_list_of_requests_says(steps: list[tuple[str, Any]]) -> None:
    clock = Clock()
    processes, naive = Processes(clock), Naive(clock)
    under_way: list[tuple[int, Charge, Entry]] = []
    for what, value in steps:
        if what == "wait":
            clock.now += value
        elif what == "count":
            process, tokens = value
            expected = naive.count(tokens)
            try:
                charge = processes.meters[process]["team-a"].count(KEY, tokens)
            except RateLimited:
                assert expected is None
            else:
                assert expected is not None
                under_way.append((process, charge, expected))
        elif what == "die":
            processes.meters[value] = processes.begin(value)
            under_way = [one for one in under_way if one[0] != value]
        elif under_way:
            number, used = value if what == "settle" else (value, 0)
            _, charge, entry = under_way.pop(number % len(under_way))
            if what == "settle":
                charge.settle(used // 2, used - used // 2)
                naive.settle(entry, used)
            else:
                charge.cancel()
                if int(clock()) - entry.second < WINDOW:
                    entry.tokens = entry.requests = 0
        remaining = [max(0, limit - used) for limit, used in zip((5, 100), naive.used(), strict=True)]
        for meters in processes.meters:
            assert [state.remaining for state in meters["team-a"].states(KEY)] == remaining
            assert [state.remaining for state in meters["team-b"].states(OTHER)] == [5, 100]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 8), st.integers(0, PROCESSES - 1), st.integers(0, 60)), max_size=120))
def test_no_minute_passes_more_than_the_limits(steps: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    processes, passed = Processes(clock), list[tuple[float, int]]()
    for wait, process, tokens in steps:
        clock.now += wait
        try:
            processes.meters[process]["team-a"].count(KEY, tokens)
        except RateLimited:
            continue
        passed.append((clock.now, tokens))
    for begin, _ in passed:
        minute = [tokens for at, tokens in passed if begin <= at <= begin + 60]
        assert len(minute) <= 5
        assert sum(minute) <= 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 20), st.integers(0, 100)), min_size=1, max_size=30), st.integers(0, 100))
def test_a_request_passes_once_the_time_it_was_told_is_over(steps: list[tuple[float, int]], tokens: int) -> None:
    clock, waits = Clock(), list[float]()
    meter = Processes(clock).meters[0]["team-a"]
    for wait, asked in steps:
        clock.now += wait
        try:
            meter.count(KEY, asked)
        except RateLimited as error:
            waits.append(error.retry_after_seconds)
    assert all(1 <= wait <= 62 for wait in waits)
    try:
        meter.count(KEY, tokens).cancel()
    except RateLimited as error:
        clock.now += error.retry_after_seconds
        meter.count(KEY, tokens)


def test_of_two_processes_that_count_at_a_time_one_sees_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(Clock())
    first, second = (processes.meters[process]["team-a"] for process in range(2))
    add, rivals = first._cells.add, [second]

    def add_late(*count: Any) -> None:
        if rivals:  # counts after the first process has looked, and before it has counted
            rivals.pop().count(KEY, 60)
        add(*count)

    monkeypatch.setattr(first._cells, "add", add_late)
    with pytest.raises(RateLimited, match="has used 60 of its 100 tokens"):
        first.count(KEY, 60)
    assert [one.remaining for one in second.states(KEY)] == [4, 40]


def test_a_refusal_says_what_is_used_and_left() -> None:
    clock = Clock()
    meter = Processes(clock).meters[0]["team-a"]
    meter.count(KEY, 80)
    clock.now += 10
    with pytest.raises(
        RateLimited, match="'team-a' has used 80 of its 100 tokens a minute, and this request needs 30"
    ) as error:
        meter.count(KEY, 30)
    assert error.value.retry_after_seconds == 51
    requests, tokens = error.value.states
    assert (requests.unit, requests.limit, requests.remaining) == ("requests", 5, 4)
    assert (tokens.unit, tokens.limit, tokens.remaining) == ("tokens", 100, 20)
    assert tokens.reset_seconds == pytest.approx(50.75)
    meter.count(KEY, 20)


def test_a_look_refuses_only_what_has_nothing_left() -> None:
    meter = Processes(Clock()).meters[0]["team-a"]
    meter.count(KEY, 99)
    meter.look(KEY)
    meter.add(Unit.TOKENS, 1)
    with pytest.raises(RateLimited, match="100 of its 100 tokens"):
        meter.look(KEY)
    with pytest.raises(RateLimited, match="requests"):
        meter.look(Key("team-a", b"", requests_per_minute=1))


def test_output_beyond_the_first_count_is_a_debt() -> None:
    clock = Clock()
    processes = Processes(clock)
    charge = processes.meters[0]["team-a"].count(KEY, 50)
    clock.now += 30
    charge.grow(170)
    with pytest.raises(RateLimited, match="170 of its 100 tokens") as error:
        processes.meters[1]["team-a"].count(KEY, 40)
    assert error.value.retry_after_seconds == 61  # the 50 leave after 31 s, which is not enough
    charge.settle(50, 120)
    clock.now += 61
    assert [one.remaining for one in processes.meters[1]["team-a"].states(KEY)] == [5, 100]


def test_keys_without_limits_count_for_metrics_alone() -> None:
    clock, free = Clock(), Key("team-a", b"a" * 32)
    meters = Processes(clock).meters
    for _ in range(50):
        meters[0]["team-a"].count(free, 1 << 20).settle(3, 4)
    assert meters[0]["team-a"].states(free) == ()


def test_another_second_ahead_counts() -> None:
    """A process may read its clock just before a second begins, and count just after another one has."""
    clock = Clock(1000.999)
    meters = Processes(clock).meters
    clock.now = 1001.0
    meters[0]["team-a"].count(KEY, 100)
    clock.now = 1000.999
    with pytest.raises(RateLimited):
        meters[1]["team-a"].count(KEY, 1)


def test_slots_are_given_to_new_names_once_the_old_ones_count_no_more() -> None:
    table = GatewayTable.alone()
    cells = KeyCells(table)
    first = cells.open(set(range(1, 1001)), 1000)
    for slot in first.values():
        cells.add(slot, Unit.TOKENS, 7, 1000)
        cells.sum(slot, Sum.REQUESTS)
    second = cells.open(set(range(2001, 3001)), 1001)
    assert len({slot.number for slot in (*first.values(), *second.values())}) == 2000
    for slot in second.values():
        cells.add(slot, Unit.TOKENS, 7, 1001)
    assert len(cells.open(set(range(4001, 5001)), 1002)) == KEY_SLOTS - 2000  # all others have counted
    late = cells.open(set(range(6001, 7001)), 1000 + WINDOW)
    assert len(late) == 1000
    gone = next(slot for slot in first.values() if slot.number in {one.number for one in late.values()})
    new = next(slot for slot in late.values() if slot.number == gone.number)
    cells.add(gone, Unit.TOKENS, 9, 1062)  # by a request that has outlived its key
    cells.take_back(gone, Unit.TOKENS, 9, 1062)
    cells.sum(gone, Sum.REQUESTS)
    assert cells.window(new.id, 1062).sum() == 0
    assert cells.sums(new.id).sum() == 0


def test_old_cells_are_emptied_before_their_second_comes_around() -> None:
    cells = KeyCells(GatewayTable.alone())
    slot = cells.open({5}, 1000)[5]
    cells.add(slot, Unit.REQUESTS, 3, 1000)
    assert cells.window(5, 1000 + (1 << 23)).sum() == 3
    cells.tidy(1000 + 3600)
    assert cells.window(5, 1000 + (1 << 23)).sum() == 0


def test_counts_are_read_while_another_process_gives_a_slot_to_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, table_bytes(PROCESSES, 1))
    here, there = (KeyCells(GatewayTable(memory, PROCESSES, 1, process)) for process in range(2))
    ids = range(1, 2 * key_cells.PART + 1)
    for number, slot in enumerate(there.open(ids, 1000).values()):
        there.add(slot, Unit.TOKENS, 100 + number, 1000)
    live, new = key_cells._live, iter([ids[-1] + 1])

    def change_first(cells: Int64Array, second: int) -> Int64Array:
        for name in new:
            there._clear(int(np.flatnonzero(there._own_ids)[-1]), name)
        return live(cells, second)

    monkeypatch.setattr(key_cells, "_live", change_first)
    counts = here.here(1000)
    told = dict(zip(counts.ids.tolist(), counts.windows[:, Unit.TOKENS].sum(-1).tolist(), strict=True))
    assert len(told) == len(ids) - 1
    assert all(told[one] == 100 + number for number, one in enumerate(ids) if one in told)


def test_other_hosts_counts_miss_a_slot_that_another_process_gave_to_a_new_name() -> None:
    memory = mmap.mmap(-1, table_bytes(PROCESSES, 1))
    here, there = (KeyCells(GatewayTable(memory, PROCESSES, 1, process), row=-1) for process in range(2))
    slots = here.open([1, 2], 1000)
    there._clear(slots[1].number, 3)
    there._changes[there._row] += 1
    here.put([slots[1], slots[2]], np.full((2, 2, WINDOW), 7), np.full((2, 2), 5), 1000)
    assert [here.used(one, 1000)[Unit.TOKENS] for one in (1, 2, 3)] == [0, 7 * WINDOW, 0]
    assert [here.is_paced(one, (9, 9), 1000) for one in (1, 3)] == [False, False]
