"""Requests of more adapters than there are slots, with priorities, on few pages: cancelled, parked, and with adapters
that are removed while they are in use. All that go on have their adapter's tokens, and nothing is left."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem.workers.config import ParkingSettings
from tandem.workers.errors import AdapterNotHeld, NoRoom
from tandem.workers.handoff.slot_turns import ASKED_SECONDS
from tests.support.adapters import merged, save_adapter
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.workers.adapters.test_slot_turns import ATTENTION, Made, Pair

NAMES = 6
REQUESTS = 18


class Storm:
    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair, self.random = pair, Random(seed)
        self.asked: dict[str, tuple[list[int], int | None, int, int]] = {}
        for number in range(REQUESTS):
            adapter = self.random.choice([None, *range(NAMES)])
            prompt = random_prompt(self.random.randint(3, 36), number)
            self.asked[f"r{number}"] = prompt, adapter, self.random.randint(0, 3), self.random.randint(2, 20)
        self.begun: list[str] = []
        self.broken: set[str] = set()
        self.removed: set[int] = set()
        self.readings = 100
        self.refusals = Counter[str]()

    def run(self) -> None:
        pair, waiting = self.pair, list(self.asked)
        for _ in range(6000):
            for name in self.random.sample(waiting, min(3, len(waiting))):
                if self._begins(name):
                    waiting.remove(name)
            if self.random.random() < 0.01 and self.begun:
                self._cancel(self.random.choice(self.begun))
            if self.random.random() < 0.02:
                self._remove_or_load(self.random.randrange(NAMES))
            self._end_failed()
            pair.clock.now += self.random.choice([0.01, ASKED_SECONDS / 8])
            self.random.choice([pair.step_prefill, pair.step_decode])()
            if not waiting and not len(pair.decode._reservations):
                break
        assert not waiting, "somebody never had a turn"
        for _ in range(600):
            pair.clock.now += 0.3
            pair.step_prefill()
            pair.step_decode()
            self._end_failed()
        pair.run_prefill()
        pair.assert_free()
        assert not len(pair.decode._parking)
        for loop in pair.loops:
            assert not loop.engine.adapters_in_use
            assert not any(one.sequences for one in loop.engine.adapters)

    def _begins(self, name: str) -> bool:
        prompt, adapter, priority, tokens = self.asked[name]
        try:
            self.pair.begin(name, prompt, adapter, priority, tokens)
        except (NoRoom, AdapterNotHeld) as error:
            self.refusals[type(error).__name__] += 1
            return False
        self.begun.append(name)
        return True

    def _cancel(self, name: str) -> None:
        self.pair.prefill.abort(name)
        self.pair.decode.abort(name, writer_quiet=False)
        self.broken.add(name)

    def _end_failed(self) -> None:
        """As a gateway does where a prompt found its adapter removed."""
        for name in self.begun:
            first = self.pair.asked[name][2]
            if name not in self.broken and first.done() and first.exception() is not None:
                assert isinstance(first.exception(), AdapterNotHeld)
                self.pair.decode.abort(name, writer_quiet=True)
                self.broken.add(name)

    def _remove_or_load(self, number: int) -> None:
        digest, path = self.pair.digests[number], str(self.pair.made.folders[number])
        if number not in self.removed:
            for loop in self.pair.loops:
                loop.engine.remove_adapter(digest)
            self.removed.add(number)
            return
        self.readings += 1
        for loop in self.pair.loops:
            try:
                loop.engine.read_adapter(self.readings, str(number), path)
            except NoRoom:  # its requests still have the memory
                return
            loop.engine.adapter_read(self.readings).result(10)
            loop.engine.load_adapter(self.readings, digest)
        self.removed.discard(number)


CASES: dict[str, dict[str, Any]] = {
    "1 slot": {"slots": (1, 1)},
    "2 slots": {"slots": (2, 2)},
    "1 and 3 slots": {"slots": (1, 3)},
    "overcommit": {"slots": (1, 2), "parking": ParkingSettings(most=16, seconds=1e6, reserved_output=0.1)},
    "nobody is parked": {"slots": (1, 2), "parking": ParkingSettings()},
}


@pytest.mark.gate("2 slots")
@pytest.mark.parametrize("case", CASES)
def test_storms(case: str, tmp_path: Path) -> None:
    model = save_checkpoint("llama", tmp_path / "model")
    oracle = load_oracle(model)
    folders = [save_adapter(oracle, tmp_path / str(seed), ATTENTION, seed=seed) for seed in range(NAMES)]
    made, counts = Made(model, folders, oracle), Counter[str]()
    for seed in range(2):
        options: dict[str, Any] = {"num_pages": 20, "sharing": bool(seed), **CASES[case]}
        pair = Pair(made, **options)
        storm = Storm(pair, seed)
        storm.run()
        counts += storm.refusals + Counter(parks=pair.decode_counters.parks)
        for adapter in (None, *range(NAMES)):
            with merged(oracle, None if adapter is None else folders[adapter]) as adapted:
                for name in storm.begun:
                    prompt, own, _, most = storm.asked[name]
                    if own != adapter or name in storm.broken:
                        continue
                    found = [pair.asked[name][2].result(0).first_token, *pair.tokens(name)]
                    assert found == greedy(adapted, prompt, most)[: len(found)], name
                    counts["whole"] += len(found) == most
    assert counts["NoSlot"] > 10
    assert counts["AdapterNotHeld"] > 0
    assert counts["whole"] > REQUESTS
    assert counts["parks"] > 0 or "parked" in case
