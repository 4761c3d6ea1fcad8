"""Penalties, biases, masks and bad words through the gateway: tokens are those of naive rules on transformers' logits,
whoever computes and decodes, in graphs and without, behind prefixes, moves, resumption and speculative prefill."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.protocol import build_request
from tandem.cluster.requests import rebalancer
from tandem.cluster.routing.policy import WorkerLoad
from tandem.cluster.routing.rebalance import Move
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2_grpc
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.e2e.test_adaptive import CHOICES, adaptive_island, choosing, in_graphs
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete, tokens_of
from tests.support.island import Island, running_island
from tests.support.naive_rules import generate, random_params
from tests.support.oracle import load_oracle, random_prompt
from tests.support.steady_steps import STEADY, steady_here

__all__ = ["in_graphs"]

VOCAB, NUM_TOKENS = 199, 24
PROMPTS = [random_prompt(3 + 11 * number, seed=number) for number in range(10)]


def asked(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters in a client's form."""
    given = {name: value for name, value in vars(params).items() if value not in (None, ())}
    return {**given, "logit_bias": dict(params.logit_bias)}


def params_of(number: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    drawn = {"temperature": 1.1, "top_k": 50} if number % 2 else {"temperature": 0.0}
    fixed = {"seed": number, "max_tokens": num_tokens, "presence_penalty": 0.7, "ignore_eos": True}
    return random_params(number, VOCAB, PROMPTS[number], **drawn, **fixed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = load_oracle(folder)
    return [generate(model, prompt, params_of(number)) for number, prompt in enumerate(PROMPTS)]


def ask_all(island: Island) -> list[list[int]]:
    """Asks for all at once."""

    def one(number: int) -> list[int]:
        return tokens_of(complete(island.address, PROMPTS[number], **asked(params_of(number))))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, range(len(PROMPTS))))


def test_rules_through_a_prefill_and_a_decode_worker(folder: Path, expected: list[list[int]]) -> None:
    """Requests come one by one, then at once, after the prefixes of earlier ones."""
    with running_island(folder) as island:
        for number, prompt in enumerate(PROMPTS):
            assert tokens_of(complete(island.address, prompt, **asked(params_of(number)))) == expected[number]
        assert ask_all(island) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)


@pytest.mark.usefixtures("in_graphs")
def test_rules_whoever_computes_the_prompt(folder: Path, expected: list[list[int]]) -> None:
    with adaptive_island(folder) as island:
        for choose in CHOICES.values():
            with choosing(island, choose):
                assert ask_all(island) == expected


def test_rules_of_requests_that_move(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, num_tokens, looks = range(1, 5), 110, itertools.count()
    model = load_oracle(folder)
    expected = [generate(model, PROMPTS[number], params_of(number, num_tokens)) for number in numbers]

    def all_move(workers: Sequence[WorkerLoad], token_seconds: float) -> list[Move]:
        source, target = workers if next(looks) % 2 else workers[::-1]
        return [Move(source, target, len(numbers))]

    monkeypatch.setattr(rebalancer, "moves", all_move)
    monkeypatch.setattr(rebalancer, "PERIOD_SECONDS", 0.05)
    with steady_here(STEADY), adaptive_island(folder) as island, ThreadPoolExecutor(len(numbers)) as pool:
        ran = [
            pool.submit(complete, island.address, PROMPTS[number], **asked(params_of(number, num_tokens)))
            for number in numbers
        ]
        answers = [one.result(100) for one in ran]
    assert [tokens_of(updates) for updates in answers] == expected
    assert sum(updates[-1].timings.moves for updates in answers if updates[-1].timings) >= 1


@pytest.mark.parametrize("received", [1, 4, 17])
def test_a_resumed_request_goes_on_with_its_counts(folder: Path, expected: list[list[int]], received: int) -> None:
    """A loss leads to this: tokens that are out become part of the prompt, and still count as output."""
    with running_island(folder) as island, grpc.insecure_channel(island.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number, prompt in enumerate(PROMPTS[:6]):
            tokens = expected[number]
            if len(tokens) <= received:
                continue
            request = build_request(prompt, asked(params_of(number)), f"resumed {number}")
            request.resume.token_ids.extend(tokens[:received])
            rest = [token for message in stub.Generate(request, timeout=60) for token in message.token_ids]
            assert rest == tokens[received:]


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Island, Tokenizer]]:
    folder = tmp_path_factory.mktemp("text") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    with running_island(folder, {"model.max_model_len": 512}) as island:
        yield island, tokenizer


@pytest.mark.parametrize("text", ["e", "the", "ze"])
def test_bad_words_as_text(with_text: tuple[Island, Tokenizer], text: str) -> None:
    """The model likes the word's tokens best, but never writes all of them in a row."""
    island, tokenizer = with_text
    word = tokenizer.encode(text, add_special_tokens=False)
    sampling: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "seed": 1, "ignore_eos": True}
    sampling["logit_bias"] = dict.fromkeys(word, 30.0)

    def has_word(tokens: list[int]) -> bool:
        return any(tokens[begin : begin + len(word)] == word for begin in range(len(tokens)))

    assert has_word(tokens_of(complete(island.address, "The cache", **sampling)))
    assert not has_word(tokens_of(complete(island.address, "The cache", bad_words=text, **sampling)))


def test_the_end_comes_no_sooner_than_min_tokens(with_text: tuple[Island, Tokenizer]) -> None:
    island, _ = with_text
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logit_bias": {7: 100.0}, "stop_token_ids": [7]}
    assert tokens_of(complete(island.address, "The cache", **sampling)) == [7]
    for least in (1, 5, 12):
        updates = complete(island.address, "The cache", min_tokens=least, **sampling)
        tokens = tokens_of(updates)
        assert (tokens.index(7) if 7 in tokens else len(tokens)) == least
        assert updates[-1].finish_reason == ("length" if least == 12 else "stop")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 9, "max_tokens": 8}, "sampling.min_tokens is 9; it must be in [0, max_tokens], which is 8"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty is 2.5; it must be in [-2, 2]"),
    ({"frequency_penalty": -3.0}, "sampling.frequency_penalty is -3.0; it must be in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty is 0.0; it must be in [0.01, 100]"),
    ({"logit_bias": {1 << 20: 1.0}}, "sampling.logit_bias is 1048576; it must be inside the vocabulary"),
    ({"logit_bias": {4: 101.0}}, "sampling.logit_bias[4] is 101.0; it must be in [-100, 100]"),
    ({"logit_bias": {"a": 1.0}}, "it must be a number for each token id in [0, 2^32)"),
    ({"bad_words": [""]}, "sampling.bad_words has 0 characters in one text; it must be 1 to 256"),
    ({"bad_words": "ab " * 60}, "tokens in one word"),
    ({"bad_words_ids": [[]]}, "sampling.bad_words_ids has 0 tokens in one word; it must be 1 to 16"),
    ({"bad_words_ids": [[1]] * 65}, "sampling.bad_words has 65 words; it must be at most 64"),
    ({"bad_words_ids": [["a"]]}, "each must be a list of integers in [0, 2^32)"),
    ({"allowed_token_ids": [1 << 20]}, "sampling.allowed_token_ids is 1048576; it must be inside the vocabulary"),
]


@pytest.mark.parametrize(("sampling", "message"), REFUSED)
def test_what_is_refused(with_text: tuple[Island, Tokenizer], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(with_text[0].address, "The cache", **sampling)
    assert message in str(caught.value)
