"""Tests what a request may contain, through the gRPC server: parameters, finish reasons, errors."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.cluster.client import Client
from tandem.cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, text_of, tokens_of
from tests.support.held_prefill import prefill_held
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY, steady_here
from tests.support.waiting import until

PROMPT = "The cache keeps keys and values in pages."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, {"model.max_model_len": 512, "cache.num_pages": 96}) as island:
        yield island


def refused(island: Island, prompt: Any, **sampling: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        complete(island.address, prompt, **sampling)
    return str(caught.value)


def test_text_is_the_decoding_of_the_tokens(island: Island, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    updates = complete(island.address, PROMPT, max_tokens=40, **GREEDY)
    assert text_of(updates) == tokenizer.decode(tokens_of(updates))
    assert updates[-1].finish_reason == "length"
    by_ids = complete(island.address, tokenizer.encode(PROMPT), max_tokens=40, **GREEDY)
    assert tokens_of(by_ids) == tokens_of(updates)


def test_chat_uses_the_checkpoints_template(island: Island, folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    messages = [{"role": "user", "content": "Where is the page?"}]
    expected = complete(island.address, tokenizer.encode_chat(messages), max_tokens=8, **GREEDY)
    with island.client() as client:
        updates = list(client.generate(messages, max_tokens=8, **GREEDY))
    assert tokens_of(updates) == tokens_of(expected)


def test_stop_string(island: Island) -> None:
    whole = text_of(complete(island.address, PROMPT, max_tokens=40, **GREEDY))
    stop = whole[11:14]
    updates = complete(island.address, PROMPT, max_tokens=40, stop=[stop], **GREEDY)
    assert text_of(updates) == whole[: whole.index(stop)]
    assert updates[-1].finish_reason == "stop"
    updates = complete(island.address, PROMPT, max_tokens=40, stop=stop, include_stop_str_in_output=True, **GREEDY)
    assert text_of(updates) == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize("index", [0, 1, 5])
def test_stop_token(island: Island, index: int) -> None:
    """The first token, which the prefill worker samples, counts like any other."""
    whole = tokens_of(complete(island.address, PROMPT, max_tokens=12, **GREEDY))
    stop = whole[index]
    updates = complete(island.address, PROMPT, max_tokens=12, stop_token_ids=[stop], **GREEDY)
    assert tokens_of(updates) == whole[: whole.index(stop) + 1]
    assert updates[-1].finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_few_tokens(island: Island, max_tokens: int) -> None:
    updates = complete(island.address, PROMPT, max_tokens=max_tokens, **GREEDY)
    assert len(tokens_of(updates)) == max_tokens
    assert updates[-1].finish_reason == "length"


def test_end_of_sequence_ends_unless_ignored(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    prompt = random_prompt(9, 0)
    tokens = greedy(load_oracle(folder), prompt, 12)
    config = folder / "generation_config.json"
    config.write_text(f'{{"eos_token_id": {tokens[4]}}}')
    with running_island(folder) as island:
        updates = complete(island.address, prompt, max_tokens=12, temperature=0)
        assert tokens_of(updates) == tokens[: tokens.index(tokens[4]) + 1]
        assert updates[-1].finish_reason == "stop"
        assert tokens_of(complete(island.address, prompt, max_tokens=12, **GREEDY)) == tokens


def test_seed_decides_whoever_is_beside(island: Island) -> None:
    prompts = [random_prompt(20, seed, 500) for seed in range(8)]
    params = {"max_tokens": 16, "temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40, "ignore_eos": True}
    together = complete_all(island.address, prompts, **params)
    alone = [tokens_of(complete(island.address, prompt, **params)) for prompt in prompts]
    assert together == alone
    other = tokens_of(complete(island.address, prompts[0], **{**params, "seed": 8}))
    assert other != alone[0]
    unseeded = {tuple(tokens_of(complete(island.address, prompts[0], max_tokens=16))) for _ in range(4)}
    assert len(unseeded) > 1


def test_logprobs(island: Island, folder: Path) -> None:
    """Transformers' logits for the same tokens are the reference, for the prefill worker's first token, too."""
    prompt = random_prompt(20, 3, 500)
    updates = complete(island.address, prompt, max_tokens=6, logprobs=3, **GREEDY)
    entries = [entry for update in updates for entry in update.logprobs]
    tokens = tokens_of(updates)
    assert [entry.token_id for entry in entries] == tokens
    import torch

    with torch.inference_mode():
        logits = load_oracle(folder)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    values = logits.log_softmax(-1)
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(values[row, tokens[row]].item(), abs=1e-3)
        top = values[row].topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-3)


ERRORS: list[tuple[Any, dict[str, Any], list[str]]] = [
    ([], {}, ["token_bytes", "0 bytes"]),
    ("", {}, ["text", "empty"]),
    ("a" * 1_000_000, {}, ["text has 1000000 characters; it may have at most"]),
    ([3, 512], {}, ["token_bytes[1]", "512", "511"]),
    ([3] * 512, {}, ["512", "511"]),
    ([3] * 500, {"max_tokens": 13}, ["sampling.max_tokens", "13", "12"]),
    (PROMPT, {"max_tokens": 0}, ["sampling.max_tokens", "0", "at least 1"]),
    (PROMPT, {"temperature": -1.0}, ["sampling.temperature", "-1", "100"]),
    (PROMPT, {"temperature": float("nan")}, ["sampling.temperature", "nan"]),
    (PROMPT, {"top_p": 0.0}, ["sampling.top_p", "(0, 1]"]),
    (PROMPT, {"top_k": -2}, ["sampling.top_k", "-2"]),
    (PROMPT, {"min_p": 1.5}, ["sampling.min_p", "1.5", "[0, 1]"]),
    (PROMPT, {"logprobs": 21}, ["sampling.logprobs", "21", "20"]),
    (PROMPT, {"stop": [""]}, ["sampling.stop", "256"]),
    (PROMPT, {"stop": ["x"] * 17}, ["sampling.stop", "17", "16"]),
    (PROMPT, {"stop_token_ids": [512]}, ["sampling.stop_token_ids", "512"]),
]


@pytest.mark.parametrize(("prompt", "sampling", "expected"), ERRORS)
def test_errors_name_field_value_and_limit(
    island: Island, prompt: Any, sampling: dict[str, Any], expected: list[str]
) -> None:
    message = refused(island, prompt, **sampling)
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"\x12\x01a\xf8\x07\x01", "GenerateRequest has unknown field number 127"),
        (b"\x1a\x05\x0a\x01\x05\x10\x01", "token_ids has unknown field number 2; this version knows ids"),
        (b"\x12\x03\xff\xfe\xfd", "5 bytes of the request cannot be read"),
    ],
)
def test_bytes_that_are_not_such_a_message_are_refused(island: Island, raw: bytes, named: str) -> None:
    with grpc.insecure_channel(island.address) as channel:
        call = channel.unary_stream("/tandem.v1.Inference/Generate")(raw, timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in str(caught.value.details())


def test_missing_input(island: Island) -> None:
    with grpc.insecure_channel(island.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(inference_pb2.GenerateRequest(), timeout=5))
    assert "text, token_ids, token_bytes, chat or fork" in str(caught.value.details())


@steady_here(STEADY)
def test_request_id_in_use(island: Island) -> None:
    with Client(island.address) as client:
        first = client.generate(PROMPT, request_id="same", max_tokens=400, **GREEDY)
        next(first)
        with pytest.raises(InvalidRequest, match="same"):
            list(client.generate(PROMPT, request_id="same"))
        first.close()


def test_request_id_may_be_used_again(island: Island) -> None:
    """This holds after a request that the gateway ended, at a stop string, and one whose client went away."""
    whole = complete(island.address, PROMPT, max_tokens=40, **GREEDY)
    stop = text_of(whole)[11:14]
    for _ in range(2):
        updates = complete(island.address, PROMPT, request_id="again", max_tokens=40, stop=[stop], **GREEDY)
        assert updates[-1].finish_reason == "stop"
    assert tokens_of(complete(island.address, PROMPT, request_id="again", max_tokens=40, **GREEDY)) == tokens_of(whole)


@pytest.mark.parametrize("most", [64, 100, 128])
def test_a_context_of_two_pages_or_less(folder: Path, most: int) -> None:
    with running_island(folder, {"cache.page_size": 64, "model.max_model_len": most}) as island:
        assert len(tokens_of(complete(island.address, [3] * (most - 4), max_tokens=4, **GREEDY))) == 4


def test_prompt_larger_than_the_pool(folder: Path) -> None:
    with running_island(folder, {"cache.num_pages": 8}) as island:
        assert "page pool" in refused(island, [3] * 64)
        with Client(island.address) as client:
            assert client.model_info().max_model_len == 64
        assert len(tokens_of(complete(island.address, [3] * 60, max_tokens=4, **GREEDY))) == 4


def test_requests_wait_for_room_and_for_no_longer_than_allowed(folder: Path) -> None:
    prompts = [random_prompt(60, seed, 500) for seed in range(6)]
    with running_island(folder, {"cache.num_pages": 16}) as island:
        assert [len(tokens) for tokens in complete_all(island.address, prompts, max_tokens=40, **GREEDY)] == [40] * 6
    with running_island(folder, {"cache.num_pages": 16, "gateway.queue_seconds": 0.05}) as island:
        decode = island.workers[1]
        with ThreadPoolExecutor(1) as pool, prefill_held(island, 2):
            running = pool.submit(complete, island.address, prompts[0], max_tokens=60, **GREEDY)
            until(lambda: decode.on_step_thread(lambda: decode.cache.pages.free) < 16)
            with pytest.raises(DeadlineExceeded, match="queue_seconds"):
                complete(island.address, prompts[1], max_tokens=60, **GREEDY)
        assert len(tokens_of(running.result(60))) == 60


@pytest.mark.parametrize("bound", [{"gateway.max_queued": 1}, {"gateway.max_queued_tokens": 130}])
def test_full_queue(folder: Path, bound: dict[str, int]) -> None:
    prompts = [random_prompt(60, seed, 500) for seed in range(12)]
    (key,) = bound
    with (
        running_island(folder, {"cache.num_pages": 16, **bound}) as island,
        pytest.raises(Overloaded, match=key) as caught,
    ):
        complete_all(island.address, prompts, resume_seconds=0, max_tokens=60, **GREEDY)
    assert 0.1 <= caught.value.retry_after_seconds <= 60
    assert caught.value.retry_after_seconds != 1.0  # what the client assumes without advice


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pool_that_holds_one_request_serves_them_one_after_another(folder: Path, workers: int) -> None:
    """Each side needs 13 pages of 13. With two workers of each kind a free one takes the next."""
    prompts = [random_prompt(60, seed, 500) for seed in range(6)]
    settings = {"cache.num_pages": 13, "island.num_prefill": workers, "island.num_decode": workers}
    with running_island(folder, settings) as island:
        tokens = complete_all(island.address, prompts, max_tokens=40, **GREEDY)
    assert tokens == greedy_all(load_oracle(folder), prompts, 40)


def test_clients_that_wait_take_turns(folder: Path) -> None:
    """One client's six requests are there first; another client's only request does not wait for all of them."""
    order: list[str] = []

    async def one(stub: inference_pb2_grpc.InferenceStub, client: str, seed: int) -> None:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=random_prompt(60, seed, 500)),
            sampling=inference_pb2.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
        )
        call = stub.Generate(request, timeout=60, metadata=(("client-id", client),))
        messages = aiter(call)
        await anext(messages)
        order.append(client)
        async for _ in messages:
            pass

    async def crowd(island: Island) -> None:
        async with grpc.aio.insecure_channel(island.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            tasks = []
            for number, client in enumerate(["much"] * 6 + ["little"]):
                tasks.append(asyncio.create_task(one(stub, client, number)))
                while island.gateway._requests.running + len(order) <= number:
                    await asyncio.sleep(0.001)
            await asyncio.gather(*tasks)

    with running_island(folder, {"cache.num_pages": 16}) as island:
        stopped, resume = threading.Event(), threading.Event()
        thread = island.workers[1]._step_thread
        assert thread is not None
        thread.call(lambda: (stopped.set(), resume.wait(30)))  # until all of them wait
        assert stopped.wait(30)
        releaser = threading.Thread(target=lambda: (until(lambda: island.gateway._requests.running == 7), resume.set()))
        releaser.start()
        asyncio.run(crowd(island))
        releaser.join(30)
    assert order.index("little") <= 2
    assert len(order) == 7
