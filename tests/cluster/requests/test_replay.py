"""Requests whose workers fail: what the gateway does then, against workers that fail as the test says."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from tandem.cluster.client import AsyncClient
from tandem.cluster.client.client_messages import GenerateUpdate, TokenLogprobs
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import AttemptsExhausted, DeadlineExceeded, InvalidRequest, ServerError
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.prefill_hints import PrefillHints
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import worker_pb2, worker_pb2_grpc
from tandem.proto.sampling import Sampling
from tests.cluster.fake_worker import FakeWorker
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import tokens_of
from tests.support.gateways import settings_of
from tests.support.prompt_specs import prompt_message

PROMPT = [5, 6, 7]
TOKENS = [(8 * 3 + number * 5) % 100 for number in range(6)]


def say(sequence: list[int]) -> int:
    return TOKENS[len(sequence) - len(PROMPT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("attempts"))


Body = Callable[[Gateway, AsyncClient, FakeWorker], Awaitable[None]]


def with_gateway(model: Path, worker: FakeWorker, body: Body, max_model_len: int = 256, **options: object) -> None:
    """Runs body beside a gateway that knows one island, served by `worker`."""
    config = load_config(None, {"model.path": str(model), "gateway.port": 0, **options})

    async def run() -> None:
        await worker.start()
        gateway = Gateway(settings_of(config, max_model_len, num_pages=max_model_len // 4))
        addresses = await gateway.start()
        await gateway.update_island(worker.state("i", epoch=1, version=1))
        try:
            async with AsyncClient(addresses.grpc) as client:
                await body(gateway, client, worker)
        finally:
            await gateway.stop(0.1)
            await worker.stop()

    asyncio.run(run())


async def ask(client: AsyncClient, *, with_logprobs: bool = False, window: int = 0) -> list[GenerateUpdate]:
    sampling: Sampling = {"max_tokens": len(TOKENS), "temperature": 0}
    if window:
        sampling["sliding"] = {"window": window, "sinks": 1}
    if with_logprobs:
        sampling["logprobs"] = 0
    stream = client.generate(PROMPT, timeout=100, **sampling)
    return [update async for update in stream]


LOST = ["UNAVAILABLE", "FAILED_PRECONDITION", "UNAUTHENTICATED", "ABORTED", "CANCELLED", "UNKNOWN", "DATA_LOSS"]


@pytest.mark.gate("UNAVAILABLE", "DATA_LOSS")
@pytest.mark.parametrize("status", LOST)
def test_a_lost_prefill_is_placed_again(model: Path, status: str) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        updates = await ask(client)
        assert tokens_of(updates) == TOKENS
        assert worker.prompts == [PROMPT, PROMPT]
        assert updates[-1].timings is not None
        assert updates[-1].timings.attempts == 2

    with_gateway(model, FakeWorker(say, {"RemoteSend": [status]}), body)


@pytest.mark.gate("UNAVAILABLE", "DATA_LOSS")
@pytest.mark.parametrize("status", LOST)
def test_a_lost_decode_goes_on_after_the_tokens_sent(model: Path, status: str) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        updates = await ask(client)
        assert tokens_of(updates) == TOKENS
        assert worker.prompts == [PROMPT, PROMPT + TOKENS[:3]]
        last = updates[-1]
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (len(PROMPT), len(TOKENS))
        assert last.finish_reason == "length"
        assert last.timings is not None
        assert (last.timings.attempts, last.timings.prefill_seconds) == (2, 2.0)
        while not worker.ended:
            await asyncio.sleep(0.01)  # the first attempt's pages are given back, and under an id of its own
        assert len(set(worker.ended)) == 1

    with_gateway(model, FakeWorker(say, {"StartGenerate": ["go on", "go on", status]}), body)


@pytest.mark.parametrize(("window", "goes_on"), [(6, True), (5, False)])
def test_a_request_that_slides_goes_on_until_its_window_is_full(model: Path, window: int, goes_on: bool) -> None:
    """3 tokens of the prompt and 3 sent: what a window of 5 let go of cannot be computed again."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        if goes_on:
            assert tokens_of(await ask(client, window=window)) == TOKENS
            return
        with pytest.raises(AttemptsExhausted, match=r"once its window is full; 3 tokens were sent; .*"):
            await ask(client, window=window)
        assert worker.prompts == [PROMPT]

    with_gateway(model, FakeWorker(say, {"StartGenerate": ["go on", "go on", "UNAVAILABLE"]}), body)


def test_workers_get_longer_messages_than_clients_may_send(tmp_path: Path) -> None:
    """Four bytes for each token of a text, which may have one for each of its own bytes."""
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=0)

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        async for _ in client.generate("\U0001f600" * 66_000, max_tokens=1, timeout=100):
            pass
        assert len(worker.prompts[0]) * 4 > 1 << 20

    options: dict[str, Any] = {"gateway.max_message_mib": 1, "gateway.queue_seconds": 0.1}
    with_gateway(tmp_path / "model", FakeWorker(lambda sequence: 7), body, max_model_len=1 << 19, **options)


def test_a_sender_that_is_not_quiet_yet_is_asked_again(model: Path) -> None:
    """The receiver hears that it may reuse the pages only when the sender has said so."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        assert tokens_of(await ask(client)) == TOKENS
        while len(worker.ended) < 4:
            await asyncio.sleep(0.01)
        assert worker.writer_quiet == [False, False, False, True]  # prefill, decode, prefill again, decode again

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["UNAVAILABLE"], "Abort": ["UNAVAILABLE"]}), body)


def test_attempts_are_bounded_and_the_error_says_why(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        with pytest.raises(AttemptsExhausted, match=r"3 attempts \(gateway.max_attempts\); 2 tokens.*as the test says"):
            await ask(client)
        assert worker.prompts == [PROMPT, PROMPT + TOKENS[:1], PROMPT + TOKENS[:2]]

    fails = {"StartGenerate": ["UNAVAILABLE"] * 2, "RemoteSend": ["go on", "go on", "UNAVAILABLE"]}
    with_gateway(model, FakeWorker(say, fails), body, **{"gateway.max_attempts": 3})


def test_what_is_the_requests_own_fault_is_not_repeated(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        with pytest.raises(InvalidRequest, match="as the test says"):
            await ask(client)
        assert worker.prompts == [PROMPT]

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["INVALID_ARGUMENT"]}), body)


@pytest.mark.parametrize(
    "fails", [{"RemoteSend": ["INTERNAL"]}, {"StartGenerate": ["INTERNAL"]}, {"StartGenerate": ["go on", "INTERNAL"]}]
)
def test_a_forward_that_failed_is_tried_again(model: Path, fails: dict[str, list[str]]) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        assert tokens_of(await ask(client)) == TOKENS
        assert len(worker.prompts) == 2

    with_gateway(model, FakeWorker(say, fails), body)


def test_and_no_more_than_once(model: Path) -> None:
    """A request that fails every forward that it is part of must not take others with it for ever."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        with pytest.raises(ServerError, match="as the test says"):
            await ask(client)
        assert worker.prompts == [PROMPT] * 2

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["INTERNAL"] * 2}), body)


def test_a_worker_that_cannot_be_reached_is_passed_over_and_costs_no_attempt(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        updates = await ask(client)
        assert tokens_of(updates) == TOKENS
        assert updates[-1].timings is not None
        assert updates[-1].timings.attempts == 1

    with_gateway(
        model, FakeWorker(say, {"PrepareReceive": ["UNAVAILABLE", "UNAVAILABLE"]}), body, **{"gateway.max_attempts": 1}
    )


def test_an_island_that_was_started_again_ends_the_calls_to_the_old_epoch(model: Path) -> None:
    """A host that vanishes closes no connection: the supervisor's word must be enough."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        asked = asyncio.ensure_future(ask(client))
        while not worker.prompts:
            await asyncio.sleep(0.01)
        await gateway.update_island(worker.state("i", epoch=2, version=2))
        assert tokens_of(await asked) == TOKENS

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["hang"]}), body)
    with_gateway(model, FakeWorker(say, {"StartGenerate": ["go on", "hang"]}), body)
    with_gateway(model, FakeWorker(say, {"PrepareReceive": ["go on"], "RemoteSend": ["hang"]}), body)


def test_calls_to_a_worker_that_is_cut_off_end_before_another_epoch_serves(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await gateway.update_island(worker.state("j", epoch=1, version=1))
        asked = asyncio.ensure_future(ask(client))
        while not worker.prompts:
            await asyncio.sleep(0.01)
        for island in ("i", "j"):  # whichever it is on
            if await gateway.placed_tokens(island):
                await gateway.update_island(IslandState(island, 1, 0, (), 2, cut_off=frozenset({0, 1})))
                break
        assert tokens_of(await asked) == TOKENS

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["hang"]}), body)
    with_gateway(model, FakeWorker(say, {"StartGenerate": ["go on", "hang"]}), body)


def test_a_request_that_no_island_takes_in_time_is_told(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await gateway.update_island(IslandState("i", 1, 0, (), 2))
        await gateway.update_island(worker.state("i", epoch=1, version=1))  # late: it must not be believed
        with pytest.raises(DeadlineExceeded, match="queue_seconds"):
            await ask(client)
        assert not worker.prompts

    options: dict[str, Any] = {"gateway.queue_seconds": 0.3}
    with_gateway(model, FakeWorker(say), body, **options)


def test_no_island_takes_requests_for_a_while(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        await gateway.update_island(IslandState("i", 1, 0, (), 2))
        asked = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.05)
        assert not worker.prompts
        await gateway.update_island(worker.state("i", epoch=2, version=3))
        assert tokens_of(await asked) == TOKENS

    with_gateway(model, FakeWorker(say), body)


def packed(*logprobs: float) -> worker_pb2.PackedLogprobs:
    """Packs log-probabilities of as many tokens, each with one alternative."""
    values, ids = np.array(logprobs, "<f4"), np.arange(len(logprobs), dtype="<u4")
    return worker_pb2.PackedLogprobs(
        logprobs=values.tobytes(), top_ids=ids.tobytes(), top_logprobs=(values + 1).tobytes()
    )


@pytest.mark.gate("fails0-True", "fails6-False")
@pytest.mark.parametrize(
    ("fails", "asks_last"),
    [
        ({}, True),
        ({"PromptLogprobs": ["UNAVAILABLE"]}, True),
        ({"PromptLogprobs": ["go on", "UNAVAILABLE"]}, True),
        ({"PromptLogprobs": ["none"]}, True),
        ({"PromptLogprobs": ["none"], "RemoteSend": ["UNAVAILABLE"]}, True),
        ({"RemoteSend": ["UNAVAILABLE"]}, False),
        ({"StartGenerate": ["go on", "go on", "UNAVAILABLE"]}, False),
    ],
)
def test_prompt_logprobs_come_once_and_in_order(model: Path, fails: dict[str, list[str]], asks_last: bool) -> None:
    """Wherever they break off: what the client has is not sent again, and what it lacks is computed again."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        sampling: Sampling = {"max_tokens": len(TOKENS), "temperature": 0, "prompt_logprobs": 1}
        updates = [update async for update in client.generate(PROMPT, timeout=20, **sampling)]
        first, *entries = [entry for update in updates for entry in update.prompt_logprobs]
        assert first is None
        assert entries == [TokenLogprobs(6, -0.5, ((0, 0.5),)), TokenLogprobs(7, -0.25, ((0, 0.75),))]
        assert tokens_of(updates) == TOKENS
        assert worker.asked[-1] == asks_last
        assert not worker.announced

    with_gateway(model, FakeWorker(say, fails, packed=[packed(-0.5), packed(-0.25)]), body)


@pytest.mark.parametrize("fails", [[], ["UNIMPLEMENTED"], ["UNAVAILABLE"], ["hang"]])
def test_an_idle_prefill_worker_hears_of_a_prompt_before_it_has_a_place(model: Path, fails: list[str]) -> None:
    """Whatever the worker answers, the request goes on."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        assert tokens_of(await ask(client)) == TOKENS
        assert worker.announced == {worker.sent[0]: PROMPT}
        assert not worker.ended

    with_gateway(model, FakeWorker(say, {"Announce": list(fails)}), body)


@pytest.mark.gate("RESOURCE_EXHAUSTED")
@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_a_prompt_without_room_is_withdrawn_and_not_announced_again(model: Path, status: str) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        assert tokens_of(await ask(client)) == TOKENS
        (announced,) = worker.announced
        assert announced in worker.ended
        assert announced not in worker.sent

    with_gateway(model, FakeWorker(say, {"PrepareReceive": [status] * 3}), body)


def test_a_prompt_whose_client_left_before_it_had_a_place_is_withdrawn(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.cluster.routing.router.PREPARE_SECONDS", 1.0
    )  # how long its pages may be asked for in vain

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        asked = asyncio.ensure_future(ask(client))
        while not worker.announced:
            await asyncio.sleep(0.01)
        asked.cancel()
        while list(worker.announced) != worker.ended:
            await asyncio.sleep(0.01)

    with_gateway(model, FakeWorker(say, {"PrepareReceive": ["hang"]}), body)


def test_pages_that_come_when_the_client_has_left_are_given_back(model: Path) -> None:
    """The decode worker has them for a request that nobody will start. No sender knows of them."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        asked = asyncio.ensure_future(ask(client))
        while not worker.announced:
            await asyncio.sleep(0.01)
        asked.cancel()
        (request_id,) = worker.announced
        while request_id not in worker.ended:  # the announced prompt
            await asyncio.sleep(0.01)
        assert worker.room is not None
        worker.room.set()
        async with asyncio.timeout(20):
            while worker.ended != [request_id] * 2:
                await asyncio.sleep(0.01)
        assert worker.writer_quiet == [False, True]

    with_gateway(model, FakeWorker(say, room=asyncio.Event()), body)


def test_a_busy_prefill_worker_hears_of_no_other_prompt(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        first = asyncio.ensure_future(ask(client))
        while not worker.sent:
            await asyncio.sleep(0.01)
        assert tokens_of(await ask(client)) == TOKENS
        assert list(worker.announced) == worker.sent[:1]
        first.cancel()
        while worker.sent[0] not in worker.ended:
            await asyncio.sleep(0.01)
        assert tokens_of(await ask(client)) == TOKENS  # it is idle again
        assert list(worker.announced) == [worker.sent[0], worker.sent[2]]

    with_gateway(model, FakeWorker(say, {"RemoteSend": ["hang"]}), body)


def test_a_first_token_is_passed_on_when_it_is_drawn(model: Path) -> None:
    """Whatever else is still to come: the other tokens, and what the answer says, wait for that."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        stream = client.generate(PROMPT, max_tokens=len(TOKENS), temperature=0, timeout=20)
        assert tokens_of([await anext(stream)]) == TOKENS[:1]
        landed.set()
        rest = [update async for update in stream]
        assert tokens_of(rest) == TOKENS[1:]
        assert rest[-1].timings is not None
        assert rest[-1].timings.prefill_seconds == 1.0

    landed = asyncio.Event()
    with_gateway(model, FakeWorker(say, draws_early=True, landed=landed), body)


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"max_tokens": 6, "stop_token_ids": [TOKENS[0]]}])
def test_a_first_token_that_is_the_last_waits_for_the_answer(model: Path, sampling: dict[str, Any]) -> None:
    """The last message says how long it took."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        (update,) = [update async for update in client.generate(PROMPT, temperature=0, timeout=20, **sampling)]
        assert tokens_of([update]) == TOKENS[:1]
        assert update.finish_reason in ("length", "stop")
        assert update.timings is not None
        assert update.timings.prefill_seconds == 1.0

    with_gateway(model, FakeWorker(say, draws_early=True), body)


def test_a_push_that_fails_behind_its_first_token_is_placed_again(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        stream = client.generate(PROMPT, max_tokens=len(TOKENS), temperature=0, timeout=20)
        updates = [await anext(stream)]
        landed.set()
        updates += [update async for update in stream]
        assert tokens_of(updates) == TOKENS
        assert worker.prompts == [PROMPT, PROMPT + TOKENS[:1]]
        assert updates[-1].timings is not None
        assert (updates[-1].timings.attempts, updates[-1].timings.prefill_seconds) == (2, 1.0)

    landed = asyncio.Event()
    fails = {"RemoteSend": ["UNAVAILABLE"], "StartGenerate": ["hang"]}  # which waits for what never lands
    with_gateway(model, FakeWorker(say, fails, draws_early=True, landed=landed), body)


def test_tokens_do_not_wait_for_the_prefill_workers_answer(model: Path) -> None:
    """It may compute the next prompt before it says that this one has landed. The last message does: it tells how long
    that took."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        worker.landed = asyncio.Event()
        updates = []
        async for update in client.generate(PROMPT, max_tokens=len(TOKENS), temperature=0, timeout=20):
            updates.append(update)
            if len(tokens_of(updates)) == len(TOKENS) - 1:
                worker.landed.set()
        assert tokens_of(updates) == TOKENS
        assert updates[-1].timings is not None
        assert updates[-1].timings.prefill_seconds == 1.0

    with_gateway(model, FakeWorker(say, draws_early=True), body)


def test_announcements_go_on_after_their_stream_has_ended(model: Path) -> None:
    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        for _ in range(3):
            assert tokens_of(await ask(client)) == TOKENS
        assert list(worker.announced) == worker.sent
        assert worker.streams == 2  # one ended, the other served two requests

    with_gateway(model, FakeWorker(say, {"Announce": ["UNAVAILABLE"]}, draws_early=True), body)


def test_announcements_at_once_all_arrive(model: Path) -> None:
    """A stream takes one message at a time."""

    async def body(gateway: Gateway, client: AsyncClient, worker: FakeWorker) -> None:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            announcements = PrefillHints(worker_pb2_grpc.WorkerStub(channel))
            prompts = {f"r{number}": [number + 5] for number in range(20)}
            drawn = [announcements.expect(request_id) for request_id in prompts]
            messages = [
                worker_pb2.AnnounceRequest(request_id=request_id, prompt=prompt_message(prompt))
                for request_id, prompt in prompts.items()
            ]
            await asyncio.gather(*map(announcements.send, messages))
            first_tokens = await asyncio.wait_for(asyncio.gather(*drawn), 10)
            assert [first.token_id for first in first_tokens] == [sum(prompt) for prompt in prompts.values()]
            assert (worker.announced, worker.streams) == (prompts, 1)
            await announcements.close()

    with_gateway(model, FakeWorker(sum, draws_early=True), body)
