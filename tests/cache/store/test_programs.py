"""Prompts of a few families on a small pool with a store below it: what comes back is what was computed."""

import pytest
import torch

from tests.cache.late_lanes import keep_late
from tests.cache.oracle import Oracle, Setting
from tests.cache.program import QUERY_HEADS, Program
from tests.cache.settings import SETTINGS

FAMILIES, PROMPTS = 4, 40


class Prompts(Program):
    """Prompts on one cache. Each takes its known prefix, has its KV and outputs compared, and is published."""

    def __init__(self, seed: int, setting: Setting, oracle: Oracle, slots: int) -> None:
        super().__init__(2 * seed, setting, oracle)
        self.side = self.sides[0]
        keep_late(self.side.cache, [slots] * len(self.side.cache._groups), seed, verify=bool(seed % 2))
        self.families = [self.draw_ids(28) for _ in range(FAMILIES)]
        self.planned: list[int] | None = None
        self.side.published.append([])

    def draw_ids(self, count: int) -> list[int]:
        planned, self.planned = getattr(self, "planned", None), None
        return super().draw_ids(count) if planned is None else planned

    def serve(self) -> None:
        side, family = self.side, self.random.choice(self.families)
        prompt = family[: self.random.choice([9, 19, 28])] + self.draw_ids(self.random.randrange(1, 4))
        matched = self.match_tokens(side, prompt)
        if matched is None:
            return
        sequence, self.planned = self.next_sequence, prompt[matched:]
        self.forward(0, [sequence], [len(prompt) - matched], [None])
        if side.known[sequence].ids == prompt:  # else there was no room
            side.cache.publish_prefix(sequence, prompt)
            side.published.append(prompt)
        self.check(0, everything=True)
        if self.random.random() < 0.8 or len(side.known) > 1:
            side.remove(self.random.choice(list(side.known)))

    def run(self, steps: int) -> None:
        with torch.inference_mode():
            for _ in range(steps):
                self.serve()
            self.end()


@pytest.mark.gate("6-two groups", "20-latents in 8 bits", "20-compressed", "20-window of 7", "20-chunks of 4 and 12")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("slots", [6, 20, 60])
def test_random_prompts(slots: int, name: str) -> None:
    setting, hits = SETTINGS[name], 0
    oracle = Oracle(setting, QUERY_HEADS)
    for seed in range(2):
        program = Prompts(seed, setting, oracle, slots)
        program.run(PROMPTS)
        counts = program.side.cache.pages
        hits += counts.host_hits
        assert counts.host_bytes_used <= counts.host_bytes
    assert hits > (2 if slots == 6 else 6)
