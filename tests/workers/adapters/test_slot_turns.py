"""Requests that wait for a slot for their adapter: others pass them, and they wait no longer than their turn takes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import pytest

from tandem.workers.config import ParkingSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import NoRoom, NoSlot
from tandem.workers.handoff import slot_turns
from tandem.workers.handoff.slot_turns import PASSED_SECONDS, SlotTurns
from tests.support.adapters import merged, save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, PREFILL, LoopPair

LONGEST = 1.5  # seconds that a request of the crowd runs


@dataclass
class Crowd:
    """The slots of one worker. Requests ask again each tenth of a second until they begin."""

    slots: int
    random: Random
    now: float = 0.0
    adapters_in_use: dict[bytes, int] = field(default_factory=dict)
    running: list[tuple[float, bytes]] = field(default_factory=list)  # when each ends
    asking: list[tuple[float, int, bytes]] = field(default_factory=list)  # since when, and the priority
    waited: dict[int, list[float]] = field(default_factory=dict)  # by priority

    def __post_init__(self) -> None:
        self.turns = SlotTurns(cast(Engine, self), lambda: self.now, 30.0)

    @property
    def num_adapter_slots(self) -> int:
        return self.slots

    def has_slot(self, digest: bytes, spare: int = 0) -> bool:
        return self.slots - len(self.adapters_in_use) - (digest not in self.adapters_in_use) >= spare

    def tick(self, arrivals: list[tuple[int, bytes]]) -> None:
        self.now += 0.1
        for _, digest in [one for one in self.running if one[0] <= self.now]:
            self.adapters_in_use[digest] -= 1
            if not self.adapters_in_use[digest]:
                del self.adapters_in_use[digest]
        self.running = [one for one in self.running if one[0] > self.now]
        self.asking += [(self.now, *one) for one in arrivals]
        refused: set[tuple[int, bytes]] = set()
        order = {name: self.random.random() for name in NAMES}  # of gateways that ask at the same time
        for ask in sorted(self.asking, key=lambda one: (order[one[2]], one[0])):
            since, priority, digest = ask
            if ask[1:] in refused:  # a gateway asks for the first of several
                continue
            if self.turns.may_begin(digest, priority):
                self.asking.remove(ask)
                self.waited.setdefault(priority, []).append(self.now - since)
                self.adapters_in_use[digest] = self.adapters_in_use.get(digest, 0) + 1
                assert len(self.adapters_in_use) <= self.slots
                self.turns.took(digest)
                self.running.append((self.now + self.random.uniform(0.2, LONGEST), digest))
            else:
                refused.add(ask[1:])


NAMES = [bytes([number]) for number in range(6)]


def test_a_free_slot_is_for_the_first_that_waits() -> None:
    crowd = Crowd(1, Random(0))
    crowd.tick([(0, NAMES[0])])
    assert not crowd.turns.may_begin(NAMES[1], 0)
    crowd.now += 0.1
    assert not crowd.turns.may_begin(NAMES[2], 0)
    crowd.adapters_in_use.clear()
    assert not crowd.turns.may_begin(NAMES[2], 0)
    assert crowd.turns.may_begin(NAMES[2], -1)
    assert crowd.turns.may_begin(NAMES[1], 0)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_every_adapter_gets_its_turn_however_many_ask(slots: int) -> None:
    crowd = Crowd(slots, Random(slots))
    for _ in range(1200):
        crowd.tick([(0, name) for name in NAMES if crowd.random.random() < 0.4])
    rounds = -(-len(NAMES) // slots)
    most = (rounds + 1) * (PASSED_SECONDS + LONGEST + 0.2)
    assert max(crowd.waited[0]) < most
    assert all(crowd.now - since < most for since, *_ in crowd.asking)


def test_without_turns_one_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the crowd above is one that starves others."""
    monkeypatch.setattr(slot_turns, "PASSED_SECONDS", 1e9)
    crowd = Crowd(2, Random(2))
    for turn in range(300):  # before the one has risen by a priority
        crowd.tick([(0, name) for name in NAMES[:2] if crowd.random.random() < 0.8] + [(0, NAMES[2])] * (turn == 30))
    assert crowd.asking == [(pytest.approx(3.1), 0, NAMES[2])]


def test_a_lower_priority_takes_nothing_from_a_higher_one() -> None:
    """Before it has risen to it."""
    crowd = Crowd(1, Random(0))
    for turn in range(800):
        crowd.tick([(0, NAMES[0])] if turn % 2 else [(3, NAMES[1])])
    assert max(crowd.waited[0]) < LONGEST + 0.2  # one of the other was running
    assert len(crowd.waited[3]) == 1
    for turn in range(200):
        crowd.tick([(0, NAMES[0])] if turn % 2 else [])
    assert len(crowd.waited[3]) > 1  # after three times 30 s


def test_an_adapter_that_nobody_asks_for_any_more_holds_nobody_up() -> None:
    crowd = Crowd(1, Random(0))
    crowd.tick([(0, NAMES[0])])
    crowd.tick([(0, NAMES[1])])
    crowd.asking.clear()
    for _ in range(100):
        crowd.tick([(0, NAMES[0])])
    assert max(crowd.waited[0]) == 0.0


# A worker's two sides

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LOW, OTHER, HIGH = random_prompt(20, 1), random_prompt(18, 2), random_prompt(40, 3)
TOKENS = 12


class Made(NamedTuple):
    model: Path
    folders: list[Path]
    oracle: Any

    def greedy(self, prompt: list[int], adapter: int | None, tokens: int = TOKENS) -> list[int]:
        with merged(self.oracle, None if adapter is None else self.folders[adapter]) as model:
            return greedy(model, prompt, tokens)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("turns")
    model = save_checkpoint("llama", root / "model")
    oracle = load_oracle(model)
    return Made(model, [save_adapter(oracle, root / str(seed), ATTENTION, seed=seed) for seed in range(3)], oracle)


class Pair(LoopPair):
    """Requests by name, of adapters by their numbers."""

    def __init__(self, made: Made, slots: tuple[int, int], **options: Any) -> None:
        options.setdefault("parking", ParkingSettings(most=8, seconds=1e6))
        super().__init__(made.model, adapters=made.folders, slots=slots, **options)
        self.made = made
        self.asked: dict[str, tuple[list[int], int | None, Any]] = {}

    def begin(self, name: str, prompt: list[int], adapter: int | None, priority: int = 0, tokens: int = TOKENS) -> None:
        """Raises NoRoom."""
        digest = b"" if adapter is None else self.digests[adapter]
        spec = replace(spec_of(prompt, adapter=digest), priority=priority)
        reservation = self.decode.prepare(name, spec, tokens, PREFILL)
        first = self.prefill.submit(name, spec, self.params(tokens), reservation)
        self.prefill.attend(name)
        self.asked[name] = prompt, adapter, first
        self.start(name, reservation, tokens)

    def finish_all(self) -> None:
        for _ in range(400):
            self.clock.now += 0.3
            self.step_prefill()
            self.step_decode()
            if not len(self.decode._reservations):
                break
        self.run_prefill()
        self.assert_free()
        for name, (prompt, adapter, first) in self.asked.items():
            found = [first.result(0).first_token, *self.tokens(name)]
            assert found == self.made.greedy(prompt, adapter, len(found)), name
            assert len(found) >= TOKENS

    @property
    def parked(self) -> set[str]:
        return {request.request_id for request in self.decode._parking._parked}

    def let_go(self) -> None:
        for _ in range(10):
            self.step_decode()
            if not self.decode._parking._leaving and not self.decode._parking._copying:
                return
        raise AssertionError("somebody still leaves")


def test_a_prompt_without_a_slot_is_passed_by_others_for_a_while(made: Made) -> None:
    pair = Pair(made, (1, 3), num_pages=64)
    pair.begin("long", HIGH, 0)  # three chunks
    pair.step_prefill()
    for name, adapter in (("waits", 1), ("base", None), ("resident", 0)):
        pair.begin(name, OTHER, adapter)
    while not pair.asked["resident"][2].done():
        assert pair.step_prefill() == 0
    assert pair.asked["base"][2].done()
    assert not pair.asked["waits"][2].done()
    scheduler = pair.loops[PREFILL].scheduler
    pair.run_prefill()
    pair.begin("long again", HIGH, 0)
    pair.step_prefill()
    for name, adapter in (("waits for long", 1), ("base again", None), ("too late", 0)):
        pair.begin(name, OTHER, adapter)
    next(one for one in scheduler._waiting if one.request_id == "waits for long").arrived -= 60
    while not pair.asked["waits for long"][2].done():
        assert pair.step_prefill() == 0
    assert pair.asked["base again"][2].done()
    assert not pair.asked["too late"][2].done()
    pair.finish_all()


def test_a_parked_request_without_a_slot_is_passed_by_others_for_a_while(made: Made) -> None:
    """The base and the adapter in the slot have requests of the same priority."""
    pair = Pair(made, (3, 1), num_pages=14)
    pair.begin("low", LOW, 0, priority=5)  # 4 pages
    pair.run_prefill()
    pair.step_decode()
    with pytest.raises(NoRoom):
        pair.begin("high", random_prompt(80, 4), None)  # 12 pages
    pair.let_go()
    assert pair.parked == {"low"}
    pair.begin("resident", OTHER, 1, tokens=30)  # 6 pages
    pair.run_prefill()
    pair.clock.now += 1
    pair.step_decode()
    assert pair.parked == {"low"}
    pair.begin("base", OTHER, None, priority=5)
    pair.begin("of the slot", random_prompt(4, 5), 1, priority=5)
    for _ in range(5):
        pair.clock.now += PASSED_SECONDS / 4
        pair.step_decode()
    with pytest.raises(NoSlot):
        pair.begin("too late", random_prompt(4, 6), 1, priority=5)
    pair.begin("base again", random_prompt(4, 7), None, priority=5)
    pair.finish_all()


def test_a_request_parks_the_rows_of_one_adapter_for_its_slot(made: Made) -> None:
    pair = Pair(made, (3, 2), num_pages=32)
    for name, adapter, priority in (("a", 0, 5), ("b", 0, 7), ("c", 1, 6), ("base", None, 9), ("d", 1, 0)):
        pair.begin(name, LOW, adapter, priority, tokens=20)
    pair.run_prefill()
    pair.step_decode()
    with pytest.raises(NoSlot) as caught:
        pair.begin("low", OTHER, 2, priority=5)  # as one of either adapter
    assert caught.value.coming is None
    with pytest.raises(NoSlot) as caught:
        pair.begin("high", OTHER, 2, priority=2)
    assert caught.value.coming is not None
    pair.let_go()
    pair.step_decode()
    assert caught.value.coming.done()
    assert pair.parked == {"a", "b"}
    pair.begin("high", OTHER, 2, priority=2)
    assert pair.loops[DECODE].num_running == 3
    pair.finish_all()
