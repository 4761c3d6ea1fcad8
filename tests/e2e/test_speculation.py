"""Speculation changes no output, with drafters that are right, wrong, both or broken, through gRPC and HTTP."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.draft_heads import save_mtp
from tests.support.drafters import SPECULATING, FailingDrafter, KnownDrafter, drafting
from tests.support.http_client import COMPLETIONS, answer, chunks
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt

NUM_TOKENS = 40
PROMPTS = [random_prompt(length, seed=length) for length in (3, 8, 17, 30, 50)]


@pytest.fixture(scope="module")
def outputs(small_model: Path) -> list[list[int]]:
    return greedy_all(load_oracle(small_model), PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    """Runs an island with drafts by prompt lookup."""
    with running_island(small_model, {**SPECULATING, "gateway.http_port": 0}) as island:
        yield island


@pytest.fixture(scope="module")
def plain(small_model: Path) -> Iterator[Island]:
    with running_island(small_model, {"gateway.http_port": 0}) as island:
        yield island


def counts(island: Island) -> tuple[int, int, int]:
    """Returns the tokens drafted, accepted, and decoded by the decode worker."""
    worker = island.workers[-1]
    loop = worker._loop
    assert loop is not None
    return worker.on_step_thread(
        lambda: (loop.counters.drafted_tokens, loop.counters.accepted_tokens, loop.decodes.decoded_tokens)
    )


@pytest.mark.gate("mixed-*")
@pytest.mark.parametrize("roles", ["split", "adaptive"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0], ids=["right", "mixed", "wrong"])
def test_tokens_equal_transformers(small_model: Path, outputs: list[list[int]], right: float, roles: str) -> None:
    with (
        drafting(KnownDrafter(PROMPTS, outputs, right)),
        running_island(small_model, {**SPECULATING, "scheduler.roles": roles}) as island,
    ):
        last = complete(island.address, PROMPTS[0], max_tokens=NUM_TOKENS, **GREEDY)
        assert tokens_of(last) == outputs[0]
        usage = last[-1].usage
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == outputs
    assert usage is not None
    if right == 1:  # 39 behind the first, in steps of 5
        assert (usage.drafted_tokens, usage.accepted_tokens) == (31, 31)
    elif right == 0:
        assert usage.accepted_tokens == 0
        assert 2 <= usage.drafted_tokens <= 23, "drafts that never hold become short and rare: 4, 4, 4, 3, 3, 2, 2, 1"
    else:
        assert 0 < usage.accepted_tokens < usage.drafted_tokens


def test_a_drafter_that_fails_is_not_asked_again(small_model: Path, outputs: list[list[int]]) -> None:
    drafter = FailingDrafter()
    with drafting(drafter), running_island(small_model, SPECULATING) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == outputs
    assert drafter.asked == 1


def test_prompt_lookup_finds_what_repeats(island: Island, small_model: Path) -> None:
    before = counts(island)
    prompt = random_prompt(12, seed=5) * 4
    update = complete(island.address, prompt, max_tokens=120, **GREEDY)
    assert tokens_of(update) == greedy(load_oracle(small_model), prompt, 120)
    drafted, accepted, decoded = (now - one for now, one in zip(counts(island), before, strict=True))
    assert decoded == 119
    assert 0 < accepted <= drafted
    usage = update[-1].usage
    assert usage is not None
    assert (usage.drafted_tokens, usage.accepted_tokens) == (drafted, accepted)


def sampled(draws: random.Random) -> dict[str, Any]:
    """Makes a request over HTTP with parameters of many kinds."""
    body: dict[str, Any] = {
        "prompt": random_prompt(6, seed=draws.randrange(99)) * draws.randrange(1, 4),
        "max_tokens": draws.randrange(1, 60),
        "temperature": draws.choice([0, 0.2, 0.7]),
        "seed": draws.randrange(1 << 30),
        "top_p": draws.choice([1, 0.8]),
        "top_k": draws.choice([-1, 2, 5]),
        "logprobs": draws.choice([None, 2]),
        "ignore_eos": draws.random() < 0.5,
        "stop_token_ids": draws.choice([[], draws.sample(range(500), 20)]),
        "return_token_ids": True,
    }
    if draws.random() < 0.3:
        body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
    if draws.random() < 0.2:
        body |= {"n": 3}
    return body


def test_http_answers_are_those_without_speculation(island: Island, plain: Island) -> None:
    """Tokens, log-probabilities and ends of answers are compared, for all sampling parameters."""
    draws, before = random.Random(11), counts(island)
    for _ in range(20):
        body = sampled(draws)
        given, due = (answer(one.http, COMPLETIONS, **body)["choices"] for one in (island, plain))
        for choice, wanted in zip(given, due, strict=True):
            assert choice["token_ids"] == wanted["token_ids"]
            assert choice["finish_reason"] == wanted["finish_reason"]
            if wanted["logprobs"] is not None:
                close = pytest.approx(wanted["logprobs"]["token_logprobs"], abs=1e-4)
                assert choice["logprobs"]["token_logprobs"] == close
    assert counts(island)[1] > before[1], "drafts were accepted"


REPEATED: dict[str, Any] = {"prompt": random_prompt(12, seed=5) * 4, "max_tokens": 50, "return_token_ids": True}
GREEDY_BODY = {"temperature": 0, "ignore_eos": True}
FEATURES: list[dict[str, Any]] = [
    {**GREEDY_BODY, "stop": ["no such", "sing"]},
    {**GREEDY_BODY, "stop": ["lea"], "include_stop_str_in_output": True},
    {"temperature": 0.3, "seed": 1, "min_tokens": 30, "stop_token_ids": [*range(64)]},
    {"temperature": 0.5, "seed": 2, "n": 3, "logprobs": 2},
    {"temperature": 0.5, "seed": 3, "n": 2, "best_of": 4},
    {**GREEDY_BODY, "prompt_logprobs": 1},
    {**GREEDY_BODY, "echo": True, "logprobs": 0},
    {**GREEDY_BODY, "logit_bias": {"7": 4.0, "9": -50.0}},
    {**GREEDY_BODY, "bad_words_ids": [[5], [6, 7]]},
    {**GREEDY_BODY, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {**GREEDY_BODY, "allowed_token_ids": [*range(4, 40)]},
    {"temperature": 1, "seed": 4, "guided_regex": "(ab|cd){4,12}"},
]
RULES = {"min_tokens", "logit_bias", "bad_words_ids", "presence_penalty", "allowed_token_ids", "guided_regex"}


def outcome(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice without numbers, which differ in their last digits."""
    return {name: choice[name] for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")}


def numbers(value: Any) -> list[float]:
    """Returns all numbers within, in order."""
    if isinstance(value, dict | list):
        return [one for held in (value.values() if isinstance(value, dict) else value) for one in numbers(held)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: "-".join(feature))
def test_each_feature_is_as_without_speculation(island: Island, plain: Island, feature: dict[str, Any]) -> None:
    body, before = REPEATED | feature, counts(island)[0]
    given, due = (answer(one.http, COMPLETIONS, **body)["choices"] for one in (island, plain))
    assert list(map(outcome, given)) == list(map(outcome, due))
    for name in ("logprobs", "prompt_logprobs"):
        kept = [numbers(choice.get(name)) for choice in due]
        assert [numbers(choice.get(name)) for choice in given] == [pytest.approx(one, abs=1e-4) for one in kept]
    drafts = counts(island)[0] - before
    assert (drafts == 0) == bool(RULES & feature.keys()), "rows whose tokens change each other's logits have no drafts"
    if "best_of" not in feature and "echo" not in feature:
        parts = [chunk["choices"][0] for chunk in chunks(island.http, COMPLETIONS, **body)]
        for choice in due:
            own = [part for part in parts if part["index"] == choice["index"]]
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
            assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_usage_tells_accepted_and_rejected(island: Island) -> None:
    body = {"prompt": random_prompt(12, seed=5) * 4, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    details = answer(island.http, COMPLETIONS, **body)["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0


@pytest.mark.long  # the gate has those of tests/e2e/test_drafters.py
def test_a_draft_model_drafts(small_model: Path, outputs: list[list[int]], plain: Island) -> None:
    """The target itself, which is always right; on workers that compute prompts for themselves and for each other."""
    draft = {"speculation.method": "draft_model", "speculation.draft": str(small_model)}
    settings = {**SPECULATING, **draft, "scheduler.roles": "adaptive", "gateway.http_port": 0}
    with running_island(small_model, settings) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == outputs
        usage = complete(island.address, PROMPTS[1], max_tokens=NUM_TOKENS, **GREEDY)[-1].usage
        assert usage is not None
        assert usage.drafted_tokens == usage.accepted_tokens > 0
        draws = random.Random(12)
        for _ in range(10):
            body = sampled(draws)
            given, due = (answer(one.http, COMPLETIONS, **body)["choices"] for one in (island, plain))
            assert [choice["token_ids"] for choice in given] == [choice["token_ids"] for choice in due]


@pytest.mark.gate("deepseek_v3")
@pytest.mark.parametrize(
    "case", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next-options", "qwen3_5", "qwen3_5-tied", "qwen3_5_moe"]
)
def test_a_layer_of_the_checkpoint_drafts(tmp_path: Path, case: str) -> None:
    """Multi-token prediction drafts over both roles; a random layer is seldom right."""
    model = save_mtp(tmp_path / "model", case)
    due = greedy_all(load_oracle(model), PROMPTS, NUM_TOKENS)
    with running_island(model, {"speculation.method": "mtp", "speculation.tokens": 4}) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == due
        assert counts(island)[0] > 0


def test_many_rows_draft_nothing(small_model: Path, outputs: list[list[int]]) -> None:
    drafter = KnownDrafter(PROMPTS, outputs)
    with (
        drafting(drafter),
        running_island(small_model, {**SPECULATING, "speculation.max_step_tokens": 1}) as island,
    ):
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == outputs
        assert counts(island)[0] == 0


@pytest.mark.parametrize(("key", "value"), [("method", "eagle"), ("tokens", 0), ("tokens", 17), ("max_ngram", 0)])
def test_bad_settings_are_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"speculation\.{key}"):
        load_config(None, {f"speculation.{key}": value})


def test_a_draft_is_named_where_one_is_asked(small_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft is null; it must be a model where .* draft_model"):
        load_config(None, {"speculation.method": "draft_model"})
    with pytest.raises(ConfigError, match=r"speculation\.draft is .*; it must be null where .* ngram"):
        load_config(None, {"speculation.method": "ngram", "speculation.draft": str(small_model)})
