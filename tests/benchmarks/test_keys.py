"""The storm of keys with limits runs, and its windows find what passes too much."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks import keys
from tests.benchmarks.key_load import GRPC, HTTP, Outcome
from tests.benchmarks.key_windows import passed_by_end, passed_first, surely_passed

LIMIT = 5
steps = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(1, 3)), max_size=12)


@given(steps)
def test_windows_are_what_a_look_at_every_moment_finds(drawn: list[tuple[int, int, int]]) -> None:
    passages = [(float(begun), float(begun + long), weight) for begun, long, weight in drawn]
    inside = [
        sum(weight for begun, ended, weight in passages if start <= begun and ended <= start + 10)
        for start in range(70)
    ]
    assert surely_passed(passages, 10) == max(inside)
    ended_in = [sum(weight for _, ended, weight in passages if start <= ended < start + 10) for start in range(70)]
    assert passed_by_end(passages, 10) == max(ended_in)
    first = min((begun for begun, _, _ in passages), default=0)
    assert passed_first(passages, 10) == sum(weight for begun, _, weight in passages if begun < first + 10)


def test_a_limit_of_each_process_would_be_found() -> None:
    """Two processes that count apart let twice as much pass."""
    few = keys.KEYS[0]
    assert few.requests is not None
    found = {}
    for count in (few.requests, 2 * few.requests):
        passed = [(0.1 * number, 0.1 * number + 0.05, 12) for number in range(count)]
        outcomes = [Outcome(few.name, passed, limited=100), Outcome("unlimited")]
        targets = keys.targets_of("calm", keys.numbers_of(outcomes, 80.0), 80.0)
        found[count // few.requests] = targets[0]["value"]
    assert found == {1: 1.0, 2: 2.0}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_gateways_admit_what_one_key_may_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten seconds of it, in which gateways are killed and the file is written anew."""
    keys.main(["--seconds", "10", "--cases", "reload"])
    result = json.loads(capsys.readouterr().out)
    found = result["cases"]["reload"]
    assert result["targets"][0]["value"] <= 1.0
    assert found["few"]["limited"] > found["few"]["passed"]
    assert found["few"]["first_minute"] == 1.0  # the gateway that is killed has no more than half of them under way
    assert 0.5 < found["tokens"]["first_minute"] <= 1.0
    assert not any(one["others"] for one in found.values())
    assert {GRPC, HTTP} == {frontend for one in keys.KEYS for frontend in one.frontends}
