"""Requests for LoRA adapters that a worker does not hold."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cache.plan.prefix_chain import adapter_salt
from tandem.proto import worker_pb2
from tandem.workers.adapters.held_adapter import HeldAdapter
from tandem.workers.adapters.peft_folder import Found
from tandem.workers.config import AdapterSettings
from tandem.workers.service.adapter_calls import AdapterLoads
from tests.support.oracle import random_prompt
from tests.support.prompt_specs import prompt_message
from tests.workers.service.test_service import EPOCH, GREEDY, Pair, code_of, running_pair

PROMPT = random_prompt(19, 0)
DIGEST = bytes(range(16))


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with running_pair(folder) as pair:
        yield pair


def prompt_of(digest: bytes) -> worker_pb2.PromptSpec:
    message = prompt_message(PROMPT)
    message.adapter = digest
    return message


def test_an_adapter_that_no_worker_holds_is_refused_on_both_sides(pair: Pair) -> None:
    ask = worker_pb2.PrepareReceiveRequest(request_id="r", epoch=EPOCH, prompt=prompt_of(DIGEST), max_tokens=4)
    with pytest.raises(grpc.RpcError, match=DIGEST.hex()) as caught:
        pair.decode.PrepareReceive(ask, timeout=10)
    assert code_of(caught) == grpc.StatusCode.NOT_FOUND
    reservation = pair.prepare("r", PROMPT)
    send = worker_pb2.RemoteSendRequest(
        request_id="r", epoch=EPOCH, prompt=prompt_of(DIGEST), sampling=GREEDY, reservation=reservation
    )
    with pytest.raises(grpc.RpcError, match=DIGEST.hex()) as caught:
        pair.prefill.RemoteSend(send, timeout=10)
    assert code_of(caught) == grpc.StatusCode.NOT_FOUND
    assert pair.abort(pair.decode, "r", writer_quiet=True)


def test_a_digest_of_another_length_is_refused(pair: Pair) -> None:
    ask = worker_pb2.PrepareReceiveRequest(request_id="r", epoch=EPOCH, prompt=prompt_of(b"abc"), max_tokens=4)
    with pytest.raises(grpc.RpcError, match="adapter has 3 bytes; it must have 16, or none") as caught:
        pair.decode.PrepareReceive(ask, timeout=10)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT


def test_a_worker_without_slots_loads_nothing(pair: Pair, folder: Path) -> None:
    load = worker_pb2.LoadAdapterRequest(epoch=EPOCH, name="a", path=str(folder))
    with pytest.raises(grpc.RpcError, match=r"adapters\.max_resident is 0") as caught:
        pair.decode.LoadAdapter(load, timeout=10)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    remove = worker_pb2.RemoveAdapterRequest(epoch=EPOCH, digest=DIGEST)
    assert not pair.decode.RemoveAdapter(remove, timeout=10).known


def test_salts_of_adapters_differ() -> None:
    salts = [adapter_salt(digest, salt) for digest in (b"", DIGEST, bytes(16)) for salt in (b"", b"s", DIGEST)]
    assert len(set(salts)) == len(salts)
    assert adapter_salt(b"", b"s") == b"s"


class Engine:
    """The part of an engine that AdapterLoads uses. It reads what the test tells it to."""

    def __init__(self) -> None:
        self.read, self.ends = Future[Found](), 0
        self.readings: dict[int, str] = {}
        self.adapters: tuple[HeldAdapter, ...] = ()

    def holds_adapter(self, digest: bytes) -> bool:
        return any(one.digest == digest for one in self.adapters)

    def read_adapter(self, number: int, name: str, path: str) -> None:
        self.readings[number] = name

    def adapter_read(self, number: int) -> "Future[Found]":
        return self.read

    def ranks_have_read(self, number: int, digest: bytes) -> bool:
        return True

    def load_adapter(self, number: int, digest: bytes) -> None:
        name, self.ends = self.readings.pop(number), self.ends + 1
        self.adapters = (HeldAdapter(digest, name, 8, 64, resident=False, sequences=0, removed=False),)

    def drop_adapter(self, number: int) -> None:
        self.readings.pop(number, None)


def loads_of(engine: Any) -> AdapterLoads:
    return AdapterLoads(engine, AdapterSettings(1, 4), lambda command: command())


def test_weights_that_two_gateways_ask_for_are_read_once() -> None:
    async def run() -> None:
        async def at_once(command: Callable[[], Any]) -> Any:
            return command()

        engine = Engine()
        loads = loads_of(engine)
        request = worker_pb2.LoadAdapterRequest(name="a", path="/a", digest=DIGEST)
        both = [asyncio.ensure_future(loads.load(request, at_once)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert len(engine.readings) == 1
        engine.read.set_result(Found(DIGEST, 8))
        first, second = await asyncio.gather(*both)
        assert first == second == worker_pb2.LoadedAdapter(digest=DIGEST, rank=8, bytes=64)
        assert engine.ends == 1

    asyncio.run(run())


def test_a_caller_that_goes_away_early_leaves_no_reading() -> None:
    """Also where the reading begins while the caller goes: its place in host memory is free again."""
    engine = Engine()

    async def gone(command: Callable[[], Any]) -> Any:
        command()
        assert engine.readings
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loads_of(engine).load(worker_pb2.LoadAdapterRequest(name="a", path="/a"), gone))
    assert not engine.readings
