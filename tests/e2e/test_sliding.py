"""Sliding requests give StreamingLLM's tokens over transformers, through gRPC and HTTP."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.support.client_requests import GREEDY, complete, complete_all_updates, tokens_of
from tests.support.http_client import answer, chunks, post, refused
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.sliding_oracle import slide_greedily

LENGTH, WINDOW, SINKS, OUTPUT = 96, 20, 3, 110
SLIDING = {"window": WINDOW, "sinks": SINKS}
PROMPTS = [random_prompt(length, seed=length) for length in (1, 7, 19, 20, 33, 70)]


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    settings = {
        "model.max_model_len": LENGTH,
        "cache.page_size": 8,
        "cache.num_pages": 64,
        "island.num_prefill": 2,
        "island.num_decode": 2,
        "island.verify_kv": True,
        "gateway.http_port": 0,
        "gateway.max_sliding_tokens": 300,
        "scheduler.max_batch_tokens": 32,
    }
    with running_island(small_model, settings) as island:
        yield island


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[list[int]]:
    oracle = load_oracle(small_model)
    return [slide_greedily(oracle, prompt, OUTPUT, WINDOW, SINKS) for prompt in PROMPTS]


def test_answers_go_beyond_the_context(island: Island, expected: list[list[int]]) -> None:
    """All come at once over gRPC, several for each of 2 decode workers; the same prompts again find prefixes."""
    send = partial(complete_all_updates, island.address, PROMPTS, max_tokens=OUTPUT, sliding=SLIDING, **GREEDY)
    for again in (False, True):
        updates = send()
        assert [tokens_of(one) for one in updates] == expected
        for prompt, one in zip(PROMPTS, updates, strict=True):
            usage = one[-1].usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt), OUTPUT)
            assert not again or usage.cached_tokens >= (len(prompt) - 1) // 8 * 8 * (len(prompt) > 32) - 8


def test_the_same_over_http(island: Island, expected: list[list[int]]) -> None:
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "sliding": SLIDING}
    found = answer(island.http, "/v1/completions", prompt=PROMPTS[4], max_tokens=OUTPUT, **body)
    assert found["choices"][0]["token_ids"] == expected[4]
    assert found["usage"]["completion_tokens"] == OUTPUT
    streamed = chunks(island.http, "/v1/completions", prompt=PROMPTS[1], max_tokens=OUTPUT, **body)
    assert [token for chunk in streamed for one in chunk["choices"] for token in one["token_ids"]] == expected[1]


def test_several_answers_and_prompts_slide_each_by_itself(island: Island, expected: list[list[int]]) -> None:
    """The prompts have log-probabilities."""
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "sliding": SLIDING}
    prompts = [PROMPTS[3], PROMPTS[4]]
    found = answer(island.http, "/v1/completions", prompt=prompts, n=2, max_tokens=OUTPUT, prompt_logprobs=1, **body)
    choices = found["choices"]
    assert [choice["token_ids"] for choice in choices] == [expected[3]] * 2 + [expected[4]] * 2
    assert [len(choices[index]["prompt_logprobs"]) for index in (0, 2)] == [len(prompt) for prompt in prompts]


def test_a_window_that_nothing_leaves_changes_nothing(island: Island, small_model: Path) -> None:
    """A request without a window runs at the same time."""
    plain = greedy(load_oracle(small_model), PROMPTS[3], 30)
    for sliding in ({}, {"sliding": {"window": 60, "sinks": 4}}):
        assert tokens_of(complete(island.address, PROMPTS[3], max_tokens=30, **sliding, **GREEDY)) == plain


@pytest.mark.parametrize(
    ("length", "sampling", "message"),
    [
        (5, {"sliding": {"window": 0, "sinks": 0}}, "sliding.window is 0; it must be at least 1"),
        (5, {"sliding": {"window": 8, "sinks": 8}}, r"sliding.sinks is 8; it must be in \[0, 8\), less than the win"),
        (5, {"sliding": {"window": 82, "sinks": 4}}, "sliding.window is 82; it must be at most 81"),
        (80, {"sliding": SLIDING}, "prompt has 80 tokens; before a window of 20 with 3 sinks it may have at most 79"),
        (5, {"sliding": SLIDING, "max_tokens": 296}, "gateway.max_sliding_tokens, 300, leaves at most 295"),
        (5, {"sliding": {"windows": 3}}, "sliding is .*; it must be an object with window and sinks"),
    ],
)
def test_what_cannot_slide_is_refused(island: Island, length: int, sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        complete(island.address, random_prompt(length, seed=0), **sampling)


def test_http_names_the_field(island: Island) -> None:
    for sliding, message in (
        ({"window": 8, "sinks": 9}, "sliding.sinks is 9; it must be in [0, 8)"),
        ({"window": 8, "sink": 2}, "sliding.sink"),
        (8, "sliding"),
    ):
        body = {"model": "model", "prompt": [1, 2], "sliding": sliding}
        error = refused(post(island.http, "/v1/completions", body), 400)
        assert message in error["message"]


def test_a_full_window_is_not_resumed(island: Island, expected: list[list[int]]) -> None:
    """Positions that have left it would have to be computed again; before that a stream goes on where it was."""
    sampling = inference_pb2.SamplingParams(
        max_tokens=OUTPUT, temperature=0, ignore_eos=True, sliding=inference_pb2.SlidingWindow(**SLIDING)
    )
    prompt = inference_pb2.TokenIds(ids=PROMPTS[1])

    def resume(count: int) -> list[int]:
        resumed = inference_pb2.Resume(token_ids=expected[1][:count])
        request = inference_pb2.GenerateRequest(
            request_id=f"resumed-{count}", token_ids=prompt, sampling=sampling, resume=resumed
        )
        with grpc.insecure_channel(island.address) as channel:
            messages = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
        return [token for message in messages for token in message.token_ids]

    assert resume(13) == expected[1][13:]
    with pytest.raises(grpc.RpcError, match=r"sampling.sliding has let go of tokens"):
        resume(14)
