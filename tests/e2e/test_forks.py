"""Requests that begin with the first tokens of a running one: tokens equal those of the same prompt as token ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client, Fork
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.errors import InvalidRequest
from tests.support.checkpoints import make_model
from tests.support.client_requests import GREEDY, tokens_of
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

PROMPT, PAGE, OUTPUT, LENGTH = random_prompt(45, seed=1), 8, 12, 2048
SETTINGS: dict[str, dict[str, Any]] = {
    "llama4": {"scheduler.roles": "adaptive"},
    "deepseek_v3-halves": {"scheduler.roles": "colocated"},
    "qwen3_next": {"cache.state_interval": 16, "cache.state_share": 0.5},
}


@contextmanager
def parent_of(client: Client, least: int, **options: Any) -> Iterator[list[int]]:
    """Runs a request that has at least `least` output tokens, and goes on for long. Yields its tokens so far."""
    tokens = list[int]()
    sampling: dict[str, Any] = {"max_tokens": 1500, **GREEDY, **options}
    updates = client.generate(PROMPT, request_id="parent", timeout=60, **sampling)
    for one in updates:
        tokens += one.token_ids
        if len(tokens) >= least:
            break
    try:
        yield tokens
    finally:
        updates.close()


def fork(client: Client, position: int | None, token_ids: Sequence[int] = (), **options: Any) -> list[GenerateUpdate]:
    sampling: dict[str, Any] = {"max_tokens": OUTPUT, "return_prompt_token_ids": True, **GREEDY, **options}
    return list(client.generate(Fork("parent", position, token_ids), timeout=60, **sampling))


@pytest.mark.gate("gemma3")
@pytest.mark.parametrize("case", ["llama", "gemma3", "llama4", "deepseek_v3-halves", "qwen3_next"])
def test_a_fork_begins_anywhere(case: str, tmp_path: Path) -> None:
    """It may begin in the prompt and in the output, at the borders of pages, after windows, and between snapshots of
    states."""
    oracle: Any = make_model(case, max_position_embeddings=LENGTH)
    oracle.save_pretrained(tmp_path)
    oracle = load_oracle(tmp_path)
    with running_island(tmp_path, SETTINGS.get(case)) as island, Client(island.address) as client:
        with parent_of(client, 60) as tokens:
            text = PROMPT + tokens
            begins = [(1, []), (PAGE, []), (44, [7, 8]), (45, []), (47, []), (56, [9]), (104, []), (len(text), [5])]
            forks = [(position, fork(client, position, more)) for position, more in begins]
            whole = fork(client, None)
        for position, updates in forks:
            prompt = list(updates[0].prompt_token_ids)
            assert prompt[:position] == text[:position]
            assert tokens_of(updates) == greedy(oracle, prompt, OUTPUT)
            usage = updates[-1].usage
            assert usage is not None
            if case == "llama" and position > 45:  # what the parent had filled is not computed again
                assert usage.cached_tokens == (len(prompt) - 1) // PAGE * PAGE
        prompt = list(whole[0].prompt_token_ids)
        assert prompt[: len(text)] == text
        assert tokens_of(whole) == greedy(oracle, prompt, OUTPUT)
        assert greedy(oracle, PROMPT, len(tokens)) == tokens  # the parent is not disturbed


@pytest.mark.long
def test_each_answer_can_be_forked(small_model: Path) -> None:
    with running_island(small_model, {"model.max_model_len": LENGTH}) as island, Client(island.address) as client:
        updates = client.generate(
            PROMPT, request_id="parent", timeout=60, max_tokens=1500, ignore_eos=True, n=2, seed=3, temperature=1.5
        )
        tokens: dict[int, list[int]] = {0: [], 1: []}
        for one in updates:
            tokens[one.index] += one.token_ids
            if len(tokens[1]) > 20:
                break
        assert tokens[0][:20] != tokens[1][:20]
        for index, its in tokens.items():
            begin = Fork("parent", len(PROMPT) + 20, index=index)
            first, *_ = client.generate(begin, timeout=60, max_tokens=2, return_prompt_token_ids=True)
            assert list(first.prompt_token_ids) == PROMPT + its[:20]
        updates.close()


def test_what_cannot_be_forked_is_refused(small_model: Path) -> None:
    with running_island(small_model, {"model.max_model_len": LENGTH}) as island, Client(island.address) as client:
        with parent_of(client, 3, cache_salt="mine") as tokens:
            there = len(PROMPT) + len(tokens)
            refused: list[tuple[Fork, dict[str, Any], str]] = [
                (Fork("parent"), {}, "fork.request_id is 'parent' and fork.index 0; no such answer"),
                (Fork("parent"), {"cache_salt": "yours"}, "credentials and cache_salt runs at this gateway process"),
                (Fork("other"), {"cache_salt": "mine"}, "fork.request_id is 'other'"),
                (Fork("parent", index=1), {"cache_salt": "mine"}, "fork.index 1; no such answer"),
                (Fork(""), {}, "fork.request_id is empty"),
                (Fork("parent", 0), {"cache_salt": "mine"}, r"fork.position is 0; the parent has \d+ tokens: 1 … "),
                (Fork("parent", 2000), {"cache_salt": "mine"}, r"fork.position is 2000; the parent has \d+ tokens"),
                (
                    Fork("parent", 3, [1 << 20]),
                    {"cache_salt": "mine"},
                    r"fork.token_ids\[0\] is 1048576; the vocabulary has",
                ),
                (Fork("parent", 3), {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens and fork are both set"),
            ]
            for one, options, message in refused:
                with pytest.raises(InvalidRequest, match=message):
                    list(client.generate(one, timeout=60, **options))
            kept = list(client.generate(Fork("parent", there), cache_salt="mine", timeout=60, max_tokens=1, **GREEDY))
            assert len(tokens_of(kept)) == 1
        with parent_of(client, 30, sliding={"window": 60, "sinks": 2}) as tokens:
            assert len(tokens_of(fork(client, 60))) == OUTPUT
            with pytest.raises(
                InvalidRequest, match=r"fork.position is 61; the parent slides, and had let go of tokens"
            ):
                fork(client, 61)
