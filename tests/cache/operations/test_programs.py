"""Random programs on two caches that send to each other, more than 20,000 steps; `make fuzz` runs others."""

from collections import Counter

import pytest

from tests.cache.oracle import Oracle
from tests.cache.program import QUERY_HEADS, Program
from tests.cache.settings import SETTINGS

PROGRAMS, STEPS = 10, 350
TREES = {"commits", "misuses", "pops of nodes", "rejections", "trees grown", "trees opened"}
ALWAYS = {"forks", "forwards", "sends", "steps", "landings"} | TREES
SHARING = ALWAYS | {"matches"}
ANYTHING = SHARING | {
    "appends beyond a map refused",
    "forks of streams",
    "landings of streams",
    "pops of streams",
    "sends of streams",
    "forks that do not slide",
    "sends to streams",
    "streams of what was held",
    "streams that slid",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_random_programs(name: str) -> None:
    setting, counts = SETTINGS[name], Counter[str]()
    oracle = Oracle(setting, QUERY_HEADS)
    for seed in range(PROGRAMS):
        program = Program(seed, setting, oracle)
        try:
            program.run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed} of setting {name!r}: make fuzz replays it")
            raise
        counts.update(program.counts)
    layout = setting.layout
    assert counts.keys() >= (SHARING if layout.drops_past or layout.has_latents else ANYTHING)
