"""Tests who shares cached prefixes with whom, and that the gateway knows who holds them: real workers, both
frontends."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.routing.prefix_view import PrefixView
from tandem.proto import inference_pb2, inference_pb2_grpc
from tandem.workers.wire.messages import prompt_to_bytes
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all, tokens_of
from tests.support.http_client import COMPLETIONS, answer, post, refused
from tests.support.island import Island, running_gateway, running_island
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.waiting import until

PAGE = 8
PROMPT = random_prompt(5 * PAGE + 3, seed=1)


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    overrides = {"cache.num_pages": 512, "gateway.http_port": 0, "security.salt_by_token": True}
    with running_island(small_model, overrides) as island:
        yield island


def ask(island: Island, prompt: list[int], salt: str = "", max_tokens: int = 4) -> tuple[list[int], int]:
    """Returns tokens, and how many of the prompt's were cached."""
    with island.client() as client:
        updates = list(client.generate(prompt, cache_salt=salt, timeout=60, max_tokens=max_tokens, **GREEDY))
    assert updates[-1].usage is not None
    return tokens_of(updates), updates[-1].usage.cached_tokens


def knows_its_workers(gateway: Gateway, island: Island) -> bool:
    """Returns whether the gateway's view equals the workers' indexes."""
    view: PrefixView[Any] = gateway._islands._prefixes.pages
    for worker in island.workers:
        keys = worker.on_step_thread(lambda worker=worker: set(worker.cache.prefix_changes().added.tolist()))
        bit = view._bits.get((worker.config.island, worker.config.pe), 0)
        if {key for key, mask in list(view._masks.items()) if mask & bit} != keys:
            return False
    return True


def test_only_requests_of_one_salt_share_a_prefix(island: Island, small_model: Path) -> None:
    expected = greedy(load_oracle(small_model), PROMPT, 4)
    for salt in ("", "mine", "theirs"):
        assert ask(island, PROMPT, salt) == (expected, 0)
        assert ask(island, PROMPT, salt) == (expected, 5 * PAGE)


def test_http_salts_as_grpc_does(island: Island) -> None:
    prompt = random_prompt(4 * PAGE + 1, seed=2)
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    first = answer(island.http, COMPLETIONS, **body, cache_salt="mine")
    assert ask(island, prompt, "mine", 2) == (first["choices"][0]["token_ids"], 4 * PAGE)
    assert ask(island, prompt, "theirs", 2)[1] == 0
    for wrong in ("x" * 257, 5):
        error = refused(post(island.http, COMPLETIONS, body | {"cache_salt": wrong}), 400)
        assert error["param"] == "cache_salt"
        assert "it must be a text of at most 256 characters" in error["message"]


def test_salts_that_cannot_be(island: Island) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt has 257 characters; it may have at most 256"):
        ask(island, PROMPT, "x" * 257)
    with pytest.raises(InvalidRequest, match="cache_salt is 5; it must be Unicode text"):
        ask(island, PROMPT, 5)  # type: ignore[arg-type]


def test_callers_with_unlike_tokens_share_nothing(island: Island) -> None:
    prompt = random_prompt(4 * PAGE + 1, seed=3)
    request = inference_pb2.GenerateRequest(
        token_bytes=prompt_to_bytes(prompt), sampling=inference_pb2.SamplingParams(max_tokens=2, temperature=0)
    )

    def cached(token: str, salt: str = "") -> int:
        request.cache_salt = salt
        with grpc.insecure_channel(island.address) as channel:
            metadata = (("authorization", f"Bearer {token}"),)
            stub = inference_pb2_grpc.InferenceStub(channel)
            return list(stub.Generate(request, metadata=metadata, timeout=60))[-1].usage.cached_tokens

    assert [cached("one"), cached("one")] == [0, 4 * PAGE]
    assert [cached("other"), cached("other")] == [0, 4 * PAGE]
    assert [cached("one", "salt"), cached("one", "salt"), cached("other", "salt")] == [0, 4 * PAGE, 0]
    assert ask(island, prompt)[1] == 0  # nor with callers without one


def test_a_resumed_request_keeps_its_salt(island: Island) -> None:
    prompt = random_prompt(6 * PAGE + 2, seed=4)
    whole, _ = ask(island, prompt, "mine", 12)
    request = inference_pb2.GenerateRequest(
        request_id="resumed",
        token_bytes=prompt_to_bytes(prompt),
        sampling=inference_pb2.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        resume=inference_pb2.Resume(token_ids=whole[:5]),
    )
    with grpc.insecure_channel(island.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for salt, cached in (("theirs", 0), ("mine", 6 * PAGE)):
            request.cache_salt = salt
            messages = list(stub.Generate(request, timeout=60))
            assert [token for message in messages for token in message.token_ids] == whole[5:]
            assert messages[-1].usage.cached_tokens == cached


@pytest.mark.gate("prefix_aware")
@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_tokens_and_view_are_right_while_prefixes_come_go_and_are_salted(small_model: Path, policy: str) -> None:
    """Two workers of each kind with room for few prefixes, and a second gateway that comes when much has happened."""
    draws = random.Random(7)
    systems = [random_prompt(length, seed=length) for length in (2 * PAGE, 3 * PAGE + 1)]
    prompts = [draws.choice(systems) + random_prompt(draws.randrange(1, 30), seed=n) for n in range(12)]
    expected = greedy_all(load_oracle(small_model), prompts, 6)
    overrides = {
        "cache.num_pages": 40,
        "island.num_prefill": 2,
        "island.num_decode": 2,
        "gateway.routing_policy": policy,
        "model.max_model_len": 128,
    }
    with running_island(small_model, overrides) as island:
        for _ in range(40):
            number = draws.randrange(len(prompts))
            tokens, cached = ask(island, prompts[number], draws.choice(["", "a", "b"]), 6)
            assert tokens == expected[number]
            assert cached <= len(prompts[number]) - 1
        until(lambda: knows_its_workers(island.gateway, island))
        assert len(island.gateway._islands._prefixes.pages)
        config = load_config(None, {"model.path": str(small_model), "cache.page_size": PAGE, "gateway.port": 0})
        workers = [worker.config for worker in island.workers]
        addresses = [worker.address for worker in island.workers]
        with running_gateway(config, 40, workers, addresses) as (_, second):
            until(lambda: knows_its_workers(second, island))
            for worker in island.workers:
                worker.on_step_thread(TvmCache.of(worker.cache).clear_prefixes)
            until(lambda: knows_its_workers(second, island) and knows_its_workers(island.gateway, island))
            assert not len(second._islands._prefixes.pages)


@pytest.mark.gate("gemma3")
@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "mistral-window", "qwen2-window"]
)
def test_families_with_windows_share_system_prompts_and_chats(family: str, tmp_path: Path) -> None:
    """Chunks shorter than the prompt, more than a window behind the system prompt, and little room for windows."""
    folder = save_checkpoint(family, tmp_path)
    oracle = load_oracle(folder)
    system = random_prompt(6 * PAGE + 2, seed=1)
    settings = {"scheduler.max_batch_tokens": 2 * PAGE, "model.max_model_len": 160, "scheduler.max_sequences": 6}
    with running_island(folder, settings) as island:
        for number, length in enumerate((5 * PAGE, 9, 1)):
            prompt = system + random_prompt(length, seed=10 + number)
            tokens, cached = ask(island, prompt, max_tokens=12)
            assert tokens == greedy(oracle, prompt, 12)
            assert cached == (6 * PAGE if number else 0)
            chat = [*prompt, *tokens, *random_prompt(5, seed=20 + number)]
            tokens, cached = ask(island, chat, max_tokens=5)
            assert tokens == greedy(oracle, chat, 5)
            assert cached >= len(prompt) // PAGE * PAGE  # the answer's pages are on the decode worker
        prompts = [system + random_prompt(3 + 7 * number, seed=30 + number) for number in range(8)]
        assert complete_all(island.address, prompts, max_tokens=20, **GREEDY) == greedy_all(oracle, prompts, 20)


def computed_tokens(model: Path, policy: str) -> int:
    """Returns the tokens computed for eight chats of five turns, all at once, on two workers of each kind.

    The last speaker of one turn speaks first in the next, so taking workers in turns gives a chat the other worker.
    """

    async def all_chats(address: str) -> int:
        computed, prompts = 0, [random_prompt(4 * PAGE, seed=50 + number) for number in range(8)]

        async def speak(client: AsyncClient, number: int, turn: int) -> None:
            nonlocal computed
            prompt = prompts[number]
            updates = [update async for update in client.generate(prompt, max_tokens=2 * PAGE + number, **GREEDY)]
            assert updates[-1].usage is not None
            computed += len(prompt) - updates[-1].usage.cached_tokens
            prompts[number] = prompt + tokens_of(updates) + random_prompt(PAGE, seed=1000 + 10 * turn + number)

        async with AsyncClient(address) as client:
            for turn in range(5):
                await asyncio.gather(*(speak(client, number, turn) for number in range(8)[:: (-1) ** turn]))
        return computed

    overrides = {
        "island.num_prefill": 2,
        "island.num_decode": 2,
        "gateway.routing_policy": policy,
        "cache.num_pages": 1024,
    }
    with running_island(model, overrides) as island:
        return asyncio.run(all_chats(island.address))


@pytest.mark.long
def test_prefix_aware_computes_less_than_least_loaded(small_model: Path) -> None:
    assert computed_tokens(small_model, "prefix_aware") < computed_tokens(small_model, "least_loaded")
