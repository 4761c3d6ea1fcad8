"""Random programs on two caches that send to each other, more than 12,000 steps; `make fuzz` runs others."""

from collections import Counter

import pytest

from tandem.cache.operations import forwards
from tests.cache.oracle import Oracle
from tests.cache.program import QUERY_HEADS, Program
from tests.cache.settings import SETTINGS

PROGRAMS, STEPS = 3, 350
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


@pytest.mark.gate("two groups", "torch kernels, *", "latents", "compressed, windows", "chunks of 8")
@pytest.mark.parametrize("name", SETTINGS)
def test_random_programs(name: str) -> None:
    slide = all(group.kind.no_sliding is None for group in SETTINGS[name].layout.groups)
    assert run_programs(name).keys() >= (ANYTHING if slide else SHARING)


def test_random_programs_of_forwards_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes forwards by token; forwards with trees are planned by sequence."""
    monkeypatch.setattr(forwards, "takes_by_token", lambda groups, tokens: tokens.trees is None)
    assert run_programs("compressed, in one plane", 2).keys() >= SHARING


def run_programs(name: str, programs: int = PROGRAMS) -> Counter[str]:
    setting, counts = SETTINGS[name], Counter[str]()
    oracle = Oracle(setting, QUERY_HEADS)
    for seed in range(programs):
        program = Program(seed, setting, oracle)
        try:
            program.run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed} of setting {name!r}: make fuzz replays it")
            raise
        counts.update(program.counts)
    return counts
