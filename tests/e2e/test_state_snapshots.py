"""Prompts of a model with recurrent layers go on from snapshots of states: in a cluster, against transformers."""

from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.e2e.test_recurrent import is_idle
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates, tokens_of
from tests.support.drafters import SPECULATING, KnownDrafter, drafting
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

EVERY, OUTPUT = 32, 9
SETTINGS: dict[str, Any] = {"cache.state_interval": EVERY, "cache.state_share": 0.5}


def cached_of(island: Island, prompt: list[int], expected: list[int], salt: str = "") -> int:
    """Compares the tokens, and returns how many tokens of the prompt were not computed."""
    with island.client() as client:
        updates = list(client.generate(prompt, cache_salt=salt, timeout=60, max_tokens=len(expected), **GREEDY))
    assert tokens_of(updates) == expected
    usage = updates[-1].usage
    assert usage is not None
    return usage.cached_tokens


def workers_of(island: Island) -> list[inference_pb2.WorkerInfo]:
    with island.client() as client:
        (info,) = client.cluster_info().islands
    return list(info.workers)


def test_prompts_go_on_from_the_last_snapshot_that_is_theirs(tmp_path: Path) -> None:
    """Snapshots come each 32 positions, and at the last full page of a prompt and of an output. The KV in between is
    known, too."""
    folder = save_checkpoint("qwen3_next", tmp_path)
    oracle, prompt = load_oracle(folder), random_prompt(150, 1)
    turn = prompt + greedy(oracle, prompt, OUTPUT) + random_prompt(20, 2)
    asked = [
        (prompt, 0),
        (prompt, 144),  # the last full page
        (prompt[:100] + random_prompt(9, 3), 96),  # 3 · 32, in the middle of an interval
        (prompt[:97] + random_prompt(40, 4), 96),
        (prompt[:31] + random_prompt(40, 5), 0),
        (turn, 144),
        (turn, 176),
    ]
    with running_island(folder, SETTINGS) as island:
        for one, cached in asked:
            assert cached_of(island, one, greedy(oracle, one, OUTPUT)) == cached
        assert cached_of(island, prompt, greedy(oracle, prompt, OUTPUT), salt="mine") == 0
        until(lambda: is_idle(island))
        for one in workers_of(island):
            assert 0 < one.snapshots <= one.free_state_pages == one.state_pages
            assert one.snapshot_bytes % one.snapshots == 0 < one.snapshot_bytes


@pytest.mark.long
def test_requests_that_move_go_on_from_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a worker that has computed its last full page, which is not so right after another move."""
    move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint("qwen3_next", tmp_path)
    prompts = [random_prompt(100 + 9 * number, seed=number) for number in range(4)]
    expected = greedy_all(load_oracle(folder), prompts, 60)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02, **SETTINGS}
    with running_island(folder, settings) as island:
        updates = complete_all_updates(island.address, prompts, max_tokens=60, **GREEDY)
        assert [tokens_of(one) for one in updates] == expected
        until(lambda: is_idle(island))
        timings = [one[-1].timings for one in updates]
        moves = sum(one.moves for one in timings if one is not None)
        computed = sum(one.counters.prompt_tokens for one in workers_of(island))
        assert moves >= 2
        assert computed < sum(map(len, prompts)) + moves * len(prompts[0])  # as if each began anew


@pytest.mark.long
@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.001, 1), (0.1, 2)])
def test_few_pages_for_snapshots(share: float, most: int, tmp_path: Path) -> None:
    """Snapshots are evicted, and lost states are computed again. most: besides a page for each sequence."""
    folder = save_checkpoint("qwen3_5", tmp_path)
    shared = random_prompt(70, 1)
    prompts = [shared[: 10 + 9 * number] + random_prompt(40, number) for number in range(7)] * 2
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    with running_island(folder, SETTINGS | {"cache.state_share": share, "scheduler.max_sequences": 3}) as island:
        for _ in range(2):
            assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected
        until(lambda: is_idle(island))
        workers = workers_of(island)
        assert [one.state_pages for one in workers] == [3 + 8 + most] * 2
        assert any(one.counters.evicted_snapshots for one in workers) == (most > 0)
        assert any(one.snapshots for one in workers) == (most > 0)


@pytest.mark.gate("mixed")
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["right", "mixed", "wrong"])
def test_drafts_are_taken_out_of_states(right: float, tmp_path: Path) -> None:
    """Any of the drafts may hold. A drafted output leaves a prefix for the next turn."""
    folder = save_checkpoint("qwen3_5", tmp_path)
    oracle, prompts = load_oracle(folder), [random_prompt(30 + 17 * number, number) for number in range(2)]
    expected = greedy_all(oracle, prompts, 24)
    with drafting(KnownDrafter(prompts, expected, right)), running_island(folder, SETTINGS | SPECULATING) as island:
        assert complete_all(island.address, prompts, max_tokens=24, **GREEDY) == expected
        counters = [one.counters for one in workers_of(island)]
        drafted, accepted = sum(one.drafted_tokens for one in counters), sum(one.accepted_tokens for one in counters)
        assert drafted > 0
        assert (accepted == drafted, accepted == 0) == (right == 1, right == 0)
        until(lambda: is_idle(island))
        turn = prompts[0] + expected[0] + random_prompt(5, 9)
        assert complete_all(island.address, [turn], max_tokens=9, **GREEDY) == [greedy(oracle, turn, 9)]


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_moe"])
def test_drafted_requests_move(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(20 + 19 * number, number) for number in range(6)]
    expected = greedy_all(load_oracle(folder), prompts, 60)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02, **SETTINGS, **SPECULATING}
    with drafting(KnownDrafter(prompts, expected, 0.7)), running_island(folder, settings) as island:
        updates = complete_all_updates(island.address, prompts, max_tokens=60, **GREEDY)
        assert [tokens_of(one) for one in updates] == expected
        timings = [one[-1].timings for one in updates]
        assert sum(one.moves for one in timings if one is not None)
        assert sum(one.counters.accepted_tokens for one in workers_of(island))
        until(lambda: is_idle(island))


@pytest.mark.long
@pytest.mark.parametrize("roles", ["split", "adaptive"])
def test_a_model_drafts_beside_states(roles: str, tmp_path: Path) -> None:
    """Its layers store what it drafts, and the states stay where they are until the step that verifies."""
    make_checkpoint(tmp_path / "target", "qwen3_next")
    make_checkpoint(tmp_path / "drafter", "llama")
    prompts = [random_prompt(20 + 19 * number, number, 512) for number in range(5)] * 2
    expected = greedy_all(load_oracle(tmp_path / "target"), prompts, 30)
    drafts = {"speculation.method": "draft_model", "speculation.draft": str(tmp_path / "drafter")}
    with running_island(tmp_path / "target", {"scheduler.roles": roles, **SETTINGS, **drafts}) as island:
        assert complete_all(island.address, prompts, max_tokens=30, **GREEDY) == expected
        assert sum(one.counters.drafted_tokens for one in workers_of(island))
        until(lambda: is_idle(island))


@pytest.mark.gate("qwen3_5_moe-split")
@pytest.mark.parametrize("roles", ["split", "adaptive"])
@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_layer_of_the_checkpoint_drafts_beside_states(
    arch: str, roles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of its drafts hold. Requests are cancelled meanwhile, or move, and drafted output is a prefix."""
    settings: dict[str, Any] = {"scheduler.roles": roles, "speculation.method": "mtp", **SETTINGS}
    if roles == "adaptive":
        move_back_and_forth(2, monkeypatch)
        settings["scheduler.token_seconds"] = 0.02
    make_checkpoint(tmp_path, arch, mtp=True)
    oracle, prompts = load_oracle(tmp_path), [random_prompt(20 + 19 * number, number, 512) for number in range(4)]
    expected = greedy_all(oracle, prompts, 40)
    with running_island(tmp_path, settings) as island, island.client() as client:
        for prompt in prompts[2:]:
            cancelled = client.generate(prompt, max_tokens=30, **GREEDY)
            next(cancelled)
            cancelled.close()
        updates = complete_all_updates(island.address, prompts, max_tokens=40, **GREEDY)
        assert [tokens_of(one) for one in updates] == expected
        counters = [one.counters for one in workers_of(island)]
        drafted, accepted = sum(one.drafted_tokens for one in counters), sum(one.accepted_tokens for one in counters)
        assert drafted / 4 < accepted < drafted
        moves = sum(one[-1].timings.moves for one in updates if one[-1].timings is not None)
        assert (moves > 0) == (roles == "adaptive")
        until(lambda: is_idle(island))
        turn = prompts[3] + expected[3] + random_prompt(9, 9, 512)
        assert cached_of(island, turn, greedy(oracle, turn, 9)) >= len(prompts[3]) // 16 * 16
