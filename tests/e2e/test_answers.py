"""Several answers to one prompt: each is what a request of its own gives, and the prompt is computed once."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.errors import InvalidRequest
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.workers.wire.messages import prompt_to_bytes
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.island import Island, running_island
from tests.support.oracle import random_prompt
from tests.support.waiting import until

PAGE = 8
NUM_PAGES = 512
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    with running_island(small_model, {"cache.num_pages": NUM_PAGES}) as island:
        yield island


def by_index(updates: list[GenerateUpdate]) -> list[list[GenerateUpdate]]:
    """Returns the updates of each answer. Each ends once, and the last update of all has usage."""
    answers: defaultdict[int, list[GenerateUpdate]] = defaultdict(list)
    for update in updates:
        answers[update.index].append(update)
    for parts in answers.values():
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].timings is not None
    assert [update.usage is not None for update in updates] == [False] * (len(updates) - 1) + [True]
    return [answers[index] for index in range(len(answers))]


def answers_of(island: Island, prompt: list[int] | str, **sampling: Any) -> list[list[GenerateUpdate]]:
    return by_index(complete(island.address, prompt, **sampling))


def singles(island: Island, prompt: list[int] | str, count: int, **sampling: Any) -> list[list[GenerateUpdate]]:
    """Returns what requests of their own give, with seeds counted from that of the sampling parameters."""
    seed = sampling.pop("seed", 0)
    return [complete(island.address, prompt, seed=(seed + index) % 2**64, **sampling) for index in range(count)]


def computed(island: Island) -> int:
    """Returns the prompt tokens computed so far."""
    with island.client() as client:
        workers = [worker for one in client.cluster_info().islands for worker in one.workers]
    return sum(worker.counters.prompt_tokens for worker in workers)


def used_pages(island: Island) -> int:
    """Returns the number of pages that the decode worker uses."""
    with island.client() as client:
        return NUM_PAGES - client.cluster_info().islands[0].workers[1].free_pages


@pytest.mark.parametrize("sampling", [DRAWN, DRAWN | {"seed": 2**64 - 2}, {"temperature": 0, "ignore_eos": True}])
@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_answers_are_those_of_single_requests(island: Island, sampling: dict[str, Any], max_tokens: int) -> None:
    prompt = random_prompt(30, 1)
    asked = {**sampling, "max_tokens": max_tokens, "logprobs": 1}
    answers = answers_of(island, prompt, n=4, **asked)
    expected = singles(island, prompt, 4, **asked)
    assert [tokens_of(parts) for parts in answers] == [tokens_of(parts) for parts in expected]
    assert [text_of(parts) for parts in answers] == [text_of(parts) for parts in expected]
    for parts, others in zip(answers, expected, strict=True):
        values, wanted = ([token.logprob for part in one for token in part.logprobs] for one in (parts, others))
        assert values == pytest.approx(wanted, abs=1e-4)
    last = answers_of(island, prompt, n=4, **asked)
    usage = next(part.usage for parts in last for part in parts if part.usage)
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (30, 4 * max_tokens, 24)


def test_the_prompt_is_computed_once_and_its_pages_are_shared(island: Island) -> None:
    n, length, max_tokens = 4, 20 * PAGE + 3, 240
    before, seen, done = computed(island), set[int](), threading.Event()

    def read() -> None:
        with island.client() as client:
            for update in client.generate(random_prompt(length, 2), n=n, max_tokens=max_tokens, timeout=60, **DRAWN):
                seen.add(update.index)
                if done.is_set() and len(seen) == n:
                    break  # cancels all that still run
        assert done.is_set()

    reader = threading.Thread(target=read)
    reader.start()
    # A reservation holds the pages of the whole output.
    own = -(-(length + max_tokens) // PAGE) - 20
    until(lambda: used_pages(island) == 20 + n * own)
    done.set()
    reader.join(60)
    assert computed(island) - before == length + (n - 1) * 3
    until(lambda: used_pages(island) == 0)


def test_log_probabilities_of_the_prompt_come_once(island: Island) -> None:
    prompt = random_prompt(30, 8)
    first, second = answers_of(island, prompt, n=2, max_tokens=4, prompt_logprobs=1, **DRAWN)
    alone = complete(island.address, prompt, max_tokens=4, prompt_logprobs=1, **DRAWN)
    expected = [entry for part in alone for entry in part.prompt_logprobs]
    assert len(expected) == 30
    assert [entry for part in first for entry in part.prompt_logprobs] == expected
    assert not any(part.prompt_logprobs for part in second)


def test_each_answer_has_its_own_stop(island: Island) -> None:
    asked = DRAWN | {"max_tokens": 40}
    texts = [text_of(parts) for parts in singles(island, "The page is", 3, **asked)]
    stops = [text[8 + 5 * index :][:3] for index, text in enumerate(texts)]
    expected = singles(island, "The page is", 3, stop=stops, **asked)
    answers = answers_of(island, "The page is", n=3, stop=stops, **asked)
    assert [text_of(parts) for parts in answers] == [text_of(parts) for parts in expected]
    assert {parts[-1].finish_reason for parts in answers} == {"stop"}
    assert len({len(tokens_of(parts)) for parts in answers}) > 1


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_gives_the_likeliest(island: Island, logprobs: int | None) -> None:
    prompt, asked = random_prompt(21, 3), DRAWN | {"max_tokens": 6}
    drawn = singles(island, prompt, 5, logprobs=0, **asked)
    means = [sum(token.logprob for part in parts for token in part.logprobs) / 6 for parts in drawn]
    ranking = sorted(range(5), key=lambda index: -means[index])
    wanted: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
    updates = complete(island.address, prompt, n=2, best_of=5, **asked, **wanted)
    assert [update.index for update in updates] == [0, 1]
    assert [tokens_of(parts) for parts in by_index(updates)] == [tokens_of(drawn[index]) for index in ranking[:2]]
    assert [update.text for update in updates] == [text_of(drawn[index]) for index in ranking[:2]]
    assert [len(update.logprobs) for update in updates] == [0 if logprobs is None else 6] * 2
    assert updates[-1].usage is not None
    assert updates[-1].usage.output_tokens == 30


def test_answers_share_a_prompt_under_windows(tmp_path: Path) -> None:
    prompt, asked = random_prompt(45, 5, 100), DRAWN | {"max_tokens": 8}
    with running_island(save_checkpoint("gemma2", tmp_path), {"model.max_model_len": 64}) as island:
        before = computed(island)
        answers = answers_of(island, prompt, n=3, **asked)
        assert computed(island) - before == 45 + 2 * 5
        expected = singles(island, prompt, 3, **asked)
        assert [tokens_of(parts) for parts in answers] == [tokens_of(parts) for parts in expected]


def test_workers_that_compute_prompts_themselves_share_them_too(small_model: Path) -> None:
    """Under adaptive roles a prompt may be computed where it is decoded, and answers may move."""
    with running_island(small_model, {"scheduler.roles": "adaptive", "cache.num_pages": NUM_PAGES}) as island:
        for seed in range(3):
            prompt, asked = random_prompt(45, 20 + seed), DRAWN | {"max_tokens": 8}
            before = computed(island)
            answers = answers_of(island, prompt, n=4, **asked)
            assert computed(island) - before == 45 + 3 * 5
            expected = singles(island, prompt, 4, **asked)
            assert [tokens_of(parts) for parts in answers] == [tokens_of(parts) for parts in expected]


@pytest.mark.parametrize("cut", range(5))
def test_a_broken_stream_goes_on_with_each_answer(island: Island, cut: int) -> None:
    prompt, asked = random_prompt(21, 4), dict[str, Any](DRAWN, max_tokens=12)
    whole = [tokens_of(parts) for parts in answers_of(island, prompt, n=3, **asked)]
    had = [random.Random(cut * 3 + index).choice((0, 1, 5, 11, 12)) for index in range(3)]
    had[cut % 3] = cut
    request = inference_pb2.GenerateRequest(
        request_id="mine",
        token_bytes=prompt_to_bytes(prompt),
        sampling=inference_pb2.SamplingParams(n=3, **asked),
        resume=inference_pb2.Resume(
            answers=[
                inference_pb2.AnswerSoFar(token_ids=tokens[:count], ended=count == 12)
                for tokens, count in zip(whole, had, strict=True)
            ]
        ),
    )
    with grpc.insecure_channel(island.address) as channel:
        messages = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60))
    for index, count in enumerate(had):
        rest = [token for message in messages if message.index == index for token in message.token_ids]
        assert rest == whole[index][count:]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert (messages[-1].usage.prompt_tokens, messages[-1].usage.output_tokens) == (21, 36)


@pytest.mark.parametrize(
    ("sampling", "resume", "message"),
    [
        ({"n": 0}, {}, r"sampling.n is 0; .* \[1, 128\]"),
        ({"n": 129}, {}, r"sampling.n is 129; .* \[1, 128\]"),
        ({"n": 3, "best_of": 2}, {}, r"sampling.best_of is 2; .* \[n, 128\], where n is 3"),
        ({"best_of": 129}, {}, r"sampling.best_of is 129"),
        ({"n": 2}, {"token_ids": [5]}, "resume.token_ids has 1 ids; with 2 answers resume.answers has them"),
        ({}, {"answers": [{}]}, "resume.answers has 1 entries; with one answer, send token_ids instead"),
        ({"n": 2}, {"answers": [{}]}, "resume.answers has 1 entries; it must have none or sampling.n: 2"),
        ({"n": 2}, {"answers": [{}, {"token_ids": [512]}]}, r"resume.answers\[1\].token_ids\[0\] is 512"),
        ({"n": 2}, {"answers": [{"ended": True}, {"ended": True}]}, "resume.answers have all ended"),
        ({"n": 2, "best_of": 3}, {"answers": [{"token_ids": [5]}, {}]}, "with best_of an answer comes whole"),
    ],
)
def test_what_cannot_be_is_refused(
    island: Island, sampling: dict[str, Any], resume: dict[str, Any], message: str
) -> None:
    request = inference_pb2.GenerateRequest(
        request_id="bad",
        token_bytes=prompt_to_bytes([5, 6]),
        sampling=inference_pb2.SamplingParams(**sampling),
        resume=inference_pb2.Resume(**resume) if resume else None,
    )
    with Client(island.address) as client, pytest.raises(InvalidRequest, match=message):
        next(client._updates(request, 60))
