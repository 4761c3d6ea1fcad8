"""Workers of several ranks, each with its heads of the recurrent states: prefixes, choices, drafts, moves, host memory.

tests/e2e/test_ranks.py has whole requests of every family, of the gate those of the two delta rules.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import is_idle
from tests.e2e.test_state_snapshots import OUTPUT, SETTINGS, cached_of, workers_of
from tests.support.checkpoints import make_model, sizes_for_ranks
from tests.support.client_requests import GREEDY, complete, complete_all, complete_all_updates, tokens_of
from tests.support.drafters import SPECULATING, KnownDrafter, drafting
from tests.support.evicting_storm import check_storm
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

CASES = ("qwen3_next", "kimi_linear", "nemotron_h")  # one of each rule
SHAPES = ((1, 2), (2, 1), (2, 2), (2, 4))
ALL = [(case, *shape) for case, shape in product(CASES, SHAPES)]
IDS = [f"{case}-{prefill}+{decode}" for case, prefill, decode in ALL]


def save(case: str, prefill: int, decode: int, folder: Path) -> dict[str, Any]:
    """Returns the settings of an island of these ranks, for a checkpoint that they can divide."""
    make_model(case, **sizes_for_ranks(case, max(prefill, decode))).save_pretrained(folder)
    return {"island.prefill_ranks": prefill, "island.decode_ranks": decode, **SETTINGS}


def check_idle(island: Island) -> None:
    """Checks that no rank holds anything, and that what was pushed was what was sent."""
    until(lambda: is_idle(island))
    assert not any(one.counters.corrupt for one in workers_of(island))


@pytest.mark.long
@pytest.mark.parametrize(("case", "prefill", "decode"), ALL, ids=IDS)
def test_prompts_go_on_from_snapshots(case: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """Some prompts are forked, for two choices."""
    settings = save(case, prefill, decode, tmp_path)
    oracle, prompt = load_oracle(tmp_path), random_prompt(150, 1)
    turn = prompt + greedy(oracle, prompt, OUTPUT) + random_prompt(20, 2)
    with running_island(tmp_path, settings) as island:
        for one, cached in (
            (prompt, 0),
            (prompt, 144),  # the last full page
            (prompt[:100] + random_prompt(9, 3), 96),  # in the middle of an interval
            (turn, 144),
        ):
            assert cached_of(island, one, greedy(oracle, one, OUTPUT)) == cached
        other = prompt[:70] + random_prompt(9, 6)
        updates = complete(island.address, other, n=2, max_tokens=OUTPUT, **GREEDY)
        choices = [tokens_of([one for one in updates if one.index == index]) for index in range(2)]
        assert choices == [greedy(oracle, other, OUTPUT)] * 2
        check_idle(island)


@pytest.mark.gate("nemotron_h-2+2")
@pytest.mark.parametrize(("case", "prefill", "decode"), ALL, ids=IDS)
def test_drafts_are_taken_out_of_states(case: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """Some drafts hold. A drafted output leaves a prefix for the next turn."""
    settings = save(case, prefill, decode, tmp_path) | SPECULATING
    oracle, prompts = load_oracle(tmp_path), [random_prompt(30 + 17 * number, number) for number in range(2)]
    due = greedy_all(oracle, prompts, 24)
    with drafting(KnownDrafter(prompts, due, 0.7)), running_island(tmp_path, settings) as island:
        assert complete_all(island.address, prompts, max_tokens=24, **GREEDY) == due
        counters = [one.counters for one in workers_of(island)]
        assert 0 < sum(one.accepted_tokens for one in counters) < sum(one.drafted_tokens for one in counters)
        turn = prompts[0] + due[0] + random_prompt(5, 9)
        assert cached_of(island, turn, greedy(oracle, turn, 9)) > 0
        check_idle(island)


@pytest.mark.long
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize(("case", "prefill", "decode"), ALL, ids=IDS)
def test_requests_move_between_unlike_workers(
    case: str, prefill: int, decode: int, speculates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some prompts are computed by their decode worker."""
    move_back_and_forth(2, monkeypatch)
    settings = save(case, prefill, decode, tmp_path)
    settings |= {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    prompts = [random_prompt(30 + 19 * number, seed=number) for number in range(5)]
    due = greedy_all(load_oracle(tmp_path), prompts, 40)
    speculation = SPECULATING if speculates else {}
    with drafting(KnownDrafter(prompts, due, 0.7)), running_island(tmp_path, settings | speculation) as island:
        updates = complete_all_updates(island.address, prompts, max_tokens=40, **GREEDY)
        assert [tokens_of(one) for one in updates] == due
        timings = [one[-1].timings for one in updates]
        assert sum(one.moves for one in timings if one is not None)
        check_idle(island)


@pytest.mark.long
@pytest.mark.parametrize(("case", "prefill", "decode"), ALL, ids=IDS)
def test_evicted_states_come_back(case: str, prefill: int, decode: int, tmp_path: Path) -> None:
    """They come from the host memory of each rank, in a storm that its records replay."""
    settings = save(case, prefill, decode, tmp_path / "model")
    check_storm(tmp_path / "model", tmp_path / "records", settings, check_idle, count=20)
