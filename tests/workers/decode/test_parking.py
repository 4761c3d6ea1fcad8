"""Running requests that give their room up to requests of lower priorities, and go on: tokens against transformers'."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.workers.config import ParkingSettings, SpeculationSettings
from tandem.workers.errors import InvalidCall, NoRoom
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams, SlidingWindow
from tests.cache.late_lanes import LateLanes
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, PREFILL, LoopPair

PARKING = ParkingSettings(most=8, seconds=1e6)
LOW, HIGH = random_prompt(20, 1), random_prompt(40, 2)  # 6 pages of 8 with 24 tokens, 7 with 10
NUM_LOW, NUM_HIGH = 24, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("parking"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[str, list[int]]:
    model = load_oracle(folder)
    return {"low": greedy(model, LOW, NUM_LOW), "high": greedy(model, HIGH, NUM_HIGH)}


class ParkingPair(LoopPair):
    """Requests by name, whose first token the prefill side tells."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given: dict[str, Any] = {"num_pages": 12, "parking": PARKING, **options}
        super().__init__(folder, **given)
        self.first: dict[str, Any] = {}

    def begin(
        self, name: str, prompt: list[int], num_tokens: int, priority: int = 0, params: SamplingParams | None = None
    ) -> None:
        """Raises NoRoom."""
        params = params or self.params(num_tokens)
        spec = replace(spec_of(prompt), priority=priority, sliding=params.sliding)
        reservation = self.decode.prepare(name, spec, num_tokens, PREFILL)
        self.first[name] = self.prefill.submit(name, spec, params, reservation)
        self.prefill.attend(name)
        self.start(name, reservation, num_tokens, params)

    def run_low(self, *names: str, steps: int = 3, **options: Any) -> None:
        """Begins requests of priority 5, and runs them for some steps."""
        for name in names or ["low"]:
            self.begin(name, LOW, NUM_LOW, priority=5, **options)
        self.run_prefill()
        for _ in range(steps):
            self.step_decode()

    def all_tokens(self, name: str) -> list[int]:
        return [self.first[name].result(0).first_token, *self.tokens(name)]

    @property
    def parked(self) -> list[str]:
        return [request.request_id for request in self.decode._parking._parked]

    def let_go(self) -> None:
        """Steps until nobody leaves any more."""
        for _ in range(10):
            self.step_decode()
            if not self.decode._parking._leaving and not self.decode._parking._copying:
                return
        raise AssertionError("somebody still leaves")

    def end_all(self) -> None:
        for _ in range(600):
            self.clock.now += 0.3
            self.step_prefill()
            self.step_decode()
            if not len(self.decode._reservations):
                break
        self.run_prefill()
        self.assert_all_free()

    def assert_all_free(self) -> None:
        self.assert_free()
        pages = self.loops[DECODE].engine.pages
        assert (pages.parked, pages.parked_bytes_used) == (0, 0)
        counters = self.decode_counters
        assert len(self.decode._parking) == 0
        assert counters.parks >= counters.resumes


class RowPair(ParkingPair):
    """`most` sequences run, and no step has more rows."""

    def __init__(self, folder: Path, *, most: int, **options: Any) -> None:
        super().__init__(folder, **{"most": most, "max_sequences": (64, 2 * most), **options})
        self._most_rows = most

    def step_decode(self) -> float | None:
        wait = super().step_decode()
        assert len(self.loops[DECODE].scheduler.rows) <= self._most_rows
        return wait


def park_low(pair: ParkingPair, steps: int = 6, **options: Any) -> None:
    """A request runs for some steps, and is parked for one of a lower priority, which is asked for again."""
    pair.run_low(steps=steps, **options)
    with pytest.raises(NoRoom) as caught:
        pair.begin("high", HIGH, NUM_HIGH)
    assert caught.value.coming is not None
    pair.let_go()
    pair.step_decode()
    assert caught.value.coming.done()
    assert pair.parked == ["low"]
    pair.begin("high", HIGH, NUM_HIGH)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_request_gives_way_and_goes_on(folder: Path, oracle: dict[str, list[int]], steps: int) -> None:
    pair = ParkingPair(folder)
    park_low(pair, steps)
    assert (pair.loops[DECODE].engine.pages.parked, pair.loops[DECODE].num_running) == (1, 0)
    before = pair.all_tokens("low")
    assert before == oracle["low"][: len(before)]
    pair.run_prefill()
    pair.clock.now += 10
    pair.step_decode()
    assert pair.parked == ["low"]  # there is no room for both
    pair.end_all()
    assert pair.all_tokens("high") == oracle["high"]
    assert pair.all_tokens("low") == oracle["low"]
    assert (pair.decode_counters.parks, pair.decode_counters.resumes) == (1, 1)


def test_it_does_not_give_way_to_its_own_priority_or_in_vain(folder: Path) -> None:
    pair = ParkingPair(folder)
    pair.begin("low", LOW, NUM_LOW, priority=5)
    pair.run_prefill()
    pair.step_decode()
    for name, prompt, most, priority in (("same", HIGH, NUM_HIGH, 5), ("higher", HIGH, NUM_HIGH, 6)):
        with pytest.raises(NoRoom) as caught:
            pair.begin(name, prompt, most, priority)
        assert caught.value.coming is None
    with pytest.raises(NoRoom, match="of priority 5 gets room before one of priority 6"):
        pair.begin("small", random_prompt(4, 5), 2, priority=6)
    pair.clock.now += 1
    awaited = pair.prepare("awaited", LOW, 12, priority=9)  # 4 pages that nobody can take away
    with pytest.raises(NoRoom) as caught:
        pair.begin("long", random_prompt(60, 4), 10)  # 9 pages, where 12 - 4 would be free
    assert caught.value.coming is None
    assert not len(pair.decode._parking)
    pair.decode.abort("awaited", writer_quiet=True)
    assert awaited
    pair.end_all()


def test_parked_requests_go_before_those_of_their_priority(folder: Path, oracle: dict[str, list[int]]) -> None:
    pair = ParkingPair(folder)
    park_low(pair)
    small = random_prompt(4, 5)
    for priority in (5, 7):
        with pytest.raises(NoRoom, match=f"priority 5 resume before one of priority {priority}"):
            pair.begin("small", small, 2, priority)
    pair.begin("small", small, 2, priority=4)
    pair.end_all()
    assert pair.all_tokens("low") == oracle["low"]


def test_nothing_goes_before_one_that_was_parked_for_too_long(folder: Path, oracle: dict[str, list[int]]) -> None:
    pair = ParkingPair(folder, parking=ParkingSettings(most=8, seconds=50.0))
    park_low(pair)
    pair.clock.now += 51
    with pytest.raises(NoRoom, match="resume before one of priority -9"):
        pair.begin("small", random_prompt(4, 5), 2, priority=-9)
    pair.end_all()
    assert pair.all_tokens("low") == oracle["low"]


def test_a_request_that_has_risen_is_not_parked_again_by_whom_it_waited_for(folder: Path) -> None:
    pair = ParkingPair(folder)
    park_low(pair)
    pair.clock.now += 5 * 30.0  # five priorities
    pair.run_prefill()
    while pair.parked:
        pair.step_decode()
    pair.step_decode()
    with pytest.raises(NoRoom) as caught:
        pair.begin("next", HIGH, NUM_HIGH)
    assert caught.value.coming is None
    with pytest.raises(NoRoom) as caught:
        pair.begin("first", HIGH, NUM_HIGH, priority=-1)
    assert caught.value.coming is not None
    pair.end_all()


@pytest.mark.parametrize("when", ["leaving", "parked", "resumed"])
def test_a_request_is_cancelled_while_it_is_parked(folder: Path, oracle: dict[str, list[int]], when: str) -> None:
    pair = ParkingPair(folder)
    if when == "leaving":
        pair.begin("low", LOW, NUM_LOW, priority=5)
        pair.run_prefill()
        pair.step_decode()
        pair.step_decode()
        with pytest.raises(NoRoom):
            pair.begin("high", HIGH, NUM_HIGH)
        assert pair.decode._parking._leaving
    else:
        park_low(pair)
    if when == "resumed":
        pair.run_prefill()
        while pair.parked:
            pair.clock.now += 0.3
            pair.step_decode()
    assert pair.decode.abort("low", writer_quiet=True)
    assert pair.ended("low") == FinishReason.ABORT
    if when == "leaving":
        pair.begin("high", HIGH, NUM_HIGH)
    pair.end_all()
    assert pair.all_tokens("high") == oracle["high"]


def test_a_gateway_is_lost_while_a_request_is_parked(folder: Path) -> None:
    pair = ParkingPair(folder)
    park_low(pair)
    pair.decode.release("", writer_quiet=True)
    pair.prefill.release("")
    pair.end_all()


def test_what_host_memory_has_no_room_for_runs_on(folder: Path, oracle: dict[str, list[int]]) -> None:
    pair = ParkingPair(folder, parked_slots=2)
    pair.begin("low", LOW, NUM_LOW, priority=5)
    pair.run_prefill()
    pair.step_decode()
    with pytest.raises(NoRoom) as caught:
        pair.begin("high", HIGH, NUM_HIGH)
    assert caught.value.coming is None
    pair.end_all()
    assert pair.all_tokens("low") == oracle["low"]
    assert pair.decode_counters.parks == 0


def test_a_request_that_lacks_only_a_sequence_begins_at_once(folder: Path, oracle: dict[str, list[int]]) -> None:
    """The one that it replaces is copied meanwhile."""
    pair = RowPair(folder, num_pages=30, most=1)
    pair.run_low()
    pair.begin("high", HIGH, NUM_HIGH)
    pair.let_go()
    assert pair.parked == ["low"]
    pair.end_all()
    assert pair.all_tokens("high") == oracle["high"]
    assert pair.all_tokens("low") == oracle["low"]
    assert (pair.decode_counters.parks, pair.decode_counters.resumes) == (1, 1)


def test_a_request_whose_pages_are_lacking_waits_until_others_are_parked(folder: Path) -> None:
    pair = RowPair(folder, num_pages=12, most=1)
    park_low(pair)
    pair.run_prefill()
    pair.end_all()


def test_what_host_memory_has_no_room_for_runs_on_when_a_sequence_is_free(
    folder: Path, oracle: dict[str, list[int]]
) -> None:
    """Two are replaced at a time, and host memory has room for one of them."""
    pair = RowPair(folder, num_pages=80, most=8, parked_slots=5)
    pair.run_low(*(f"low {number}" for number in range(8)))
    for number in range(2):
        pair.begin(f"high {number}", HIGH, NUM_HIGH)
    with pytest.raises(NoRoom):  # no more are replaced before these are copied
        pair.begin("high 2", HIGH, NUM_HIGH)
    pair.run_prefill()
    pair.end_all()
    for number in range(8):
        assert pair.all_tokens(f"low {number}") == oracle["low"]
    for number in range(2):
        assert pair.all_tokens(f"high {number}") == oracle["high"]
    assert pair.decode_counters.parks == pair.decode_counters.resumes == 1


def test_requests_that_slide_are_not_parked(folder: Path) -> None:
    pair = ParkingPair(folder)
    pair.begin("low", LOW, 60, 5, replace(pair.params(60), sliding=SlidingWindow(32, 4)))
    pair.run_prefill()
    pair.step_decode()
    with pytest.raises(NoRoom) as caught:
        pair.begin("high", HIGH, NUM_HIGH)
    assert caught.value.coming is None
    pair.decode.abort("low", writer_quiet=True)
    pair.end_all()


OVERCOMMIT = ParkingSettings(most=16, seconds=1e6, reserved_output=0.1)


@pytest.mark.parametrize("num_pages", [9, 12])
def test_requests_take_pages_as_they_grow(folder: Path, oracle: dict[str, list[int]], num_pages: int) -> None:
    """Three that would reserve 18 pages begin on 9."""
    pair = ParkingPair(folder, parking=OVERCOMMIT, num_pages=num_pages)
    names = ["a", "b", "c"]
    for name in names:
        pair.begin(name, LOW, NUM_LOW)
    assert [pair.decode._reservations._requests[name].reserved for name in names] == [24] * 3
    pair.run_prefill()
    ended = []
    for _ in range(400):
        pair.step_decode()
        pair.clock.now += 0.3
        ended += [name for name in names if name not in ended and pair.ended(name) is not None]
    assert ended[0] == "a"  # the first one never gives way
    pair.end_all()
    assert [pair.all_tokens(name) for name in names] == [oracle["low"]] * 3
    assert pair.decode_counters.parks > 0


def test_one_as_long_as_the_pool_ends(folder: Path, oracle: dict[str, list[int]]) -> None:
    """It ends whatever else runs."""
    pair = ParkingPair(folder, parking=OVERCOMMIT)
    most = 96 - len(LOW) + 1
    pair.begin("long", LOW, most)
    pair.begin("low", LOW, NUM_LOW)
    pair.begin("other", LOW, NUM_LOW)
    pair.run_prefill()
    pair.end_all()
    assert pair.all_tokens("long")[:NUM_LOW] == pair.all_tokens("low") == pair.all_tokens("other") == oracle["low"]
    assert len(pair.all_tokens("long")) == most
    with pytest.raises(InvalidCall, match="prompt and max_tokens need 13 pages; this worker has 12"):
        pair.begin("longer", LOW, most + 1)


def test_what_host_memory_has_no_room_for_is_dropped(folder: Path, oracle: dict[str, list[int]]) -> None:
    """So the first one ends; the gateway places the others again."""
    pair = ParkingPair(folder, parking=OVERCOMMIT, parked_slots=1)
    for name in ("a", "b", "c"):
        pair.begin(name, LOW, NUM_LOW)
    pair.run_prefill()
    pair.end_all()
    assert pair.all_tokens("a") == oracle["low"]
    assert FinishReason.ABORT in (pair.ended("b"), pair.ended("c"))
    for name in ("b", "c"):
        tokens = pair.all_tokens(name)
        assert tokens == oracle["low"][: len(tokens)]


class Storm:
    """Requests of random priorities on few pages. Some are cancelled."""

    def __init__(self, pair: ParkingPair, seed: int, varied: bool) -> None:
        self.pair, self.random = pair, Random(seed)
        self.asked: dict[str, tuple[list[int], int, int, SamplingParams]] = {}
        for number in range(14):
            prompt, most = random_prompt(self.random.randint(3, 36), number), self.random.randint(2, 24)
            params = pair.params(most)
            if varied and number % 2:
                params = replace(params, repetition_penalty=1.3, presence_penalty=0.4, min_tokens=min(3, most))
            elif varied and number % 4 == 2:
                params = replace(params, temperature=0.8, seed=number)
            self.asked[f"r{number}"] = prompt, most, self.random.randint(0, 3), params
        self.begun: list[str] = []
        self.cancelled: set[str] = set()

    def run(self) -> None:
        pair, waiting = self.pair, list(self.asked)
        for _ in range(4000):
            if self.random.random() < 0.4 and waiting:
                name = self.random.choice(waiting)
                prompt, most, priority, params = self.asked[name]
                try:
                    pair.begin(name, prompt, most, priority, params)
                except NoRoom:
                    pass
                else:
                    waiting.remove(name)
                    self.begun.append(name)
            if self.random.random() < 0.01 and self.begun:
                name = self.random.choice(self.begun)
                pair.prefill.abort(name)
                if pair.decode.abort(name, writer_quiet=False) and name not in pair.decode._reservations._requests:
                    self.cancelled.add(name)
            pair.clock.now += self.random.choice([0.01, 0.3])
            self.random.choice([pair.step_prefill, pair.step_decode])()
            if not waiting and not len(pair.decode._reservations):
                break
        pair.end_all()


CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "ngram": {"speculation": SpeculationSettings("ngram", 3, 24, 2)},
    "gemma2": {},
    "few sequences": {"num_pages": 60, "most": 3},
    "few sequences, little host memory": {"num_pages": 60, "most": 5, "parked_slots": 5},
    "qwen3_next": {"snapshots": SnapshotRule(16, 12), "sharing": True},
    "deepseek_v3": {},
    "deepseek_v4": {},
    "overcommit": {"parking": OVERCOMMIT},
    "overcommit, ngram": {"parking": OVERCOMMIT, "speculation": SpeculationSettings("ngram", 3, 24, 2)},
    "overcommit, gemma2": {"parking": OVERCOMMIT},
    "overcommit, qwen3_next": {"parking": OVERCOMMIT, "snapshots": SnapshotRule(16, 12), "sharing": True},
    "overcommit, deepseek_v4": {"parking": OVERCOMMIT},
}


@pytest.mark.gate("overcommit")
@pytest.mark.parametrize("case", CASES)
def test_storms(case: str, tmp_path: Path) -> None:
    family = case.removeprefix("overcommit, ")
    family = "llama" if family in ("ngram", "overcommit") or "sequences" in family else family
    folder = save_checkpoint(family, tmp_path)
    model, counts = load_oracle(folder), Counter[str]()
    known = ParkingPair(folder, num_pages=200, parking=ParkingSettings(), max_sequences=(64, 64), sharing=False)
    expected: dict[tuple[int, ...], list[int]] = {}
    for seed in range(2):
        late = partial(LateLanes, random=Random(seed), most_looks=8) if seed else None
        options: dict[str, Any] = {"num_pages": 16, "sharing": bool(seed), "parked_lanes": late, **CASES[case]}
        pair = RowPair(folder, **options) if "most" in options else ParkingPair(folder, **options)
        storm = Storm(pair, seed, varied=True)
        storm.run()
        counts["parks"] += pair.decode_counters.parks
        counts["resumes"] += pair.decode_counters.resumes
        for name in storm.begun:
            prompt, most, _, params = storm.asked[name]
            if name in storm.cancelled or not pair.first[name].done() or pair.first[name].exception():
                continue
            tokens = pair.all_tokens(name)
            assert pair.ended(name) in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT)
            if params == pair.params(most):
                assert tokens == greedy(model, prompt, most)[: len(tokens)], name
            else:
                key = (seed, *prompt)
                if key not in expected:
                    known.begin(f"{seed} {name}", prompt, most, 0, params)
                    known.run_prefill()
                    known.run_decode()
                    expected[key] = known.all_tokens(f"{seed} {name}")
                assert tokens == expected[key][: len(tokens)], name
            counts["whole"] += len(tokens) == most
    assert counts["parks"] > 3
    assert counts["resumes"] > 3
    assert counts["whole"] > 10
