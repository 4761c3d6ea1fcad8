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
    with pytest.raises(grpc.RpcError, match="adapter has 3 bytes; 16 are accepted") as caught:
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


def test_a_caller_that_goes_away_early_leaves_no_reading() -> None:
    """Also where the reading begins while the caller goes: its place in host memory is free again."""
    readings: set[int] = set()

    class Reads:
        def holds_adapter(self, digest: bytes) -> bool:
            return False

        def read_adapter(self, number: int, name: str, path: str) -> None:
            readings.add(number)

        def adapter_read(self, number: int) -> "Future[Any]":
            return Future()

        def drop_adapter(self, number: int) -> None:
            readings.discard(number)

    async def gone(command: Callable[[], Any]) -> Any:
        command()
        assert readings
        raise asyncio.CancelledError

    engine: Any = Reads()
    loads = AdapterLoads(engine, AdapterSettings(1, 4), lambda command: command())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loads.load(worker_pb2.LoadAdapterRequest(name="a", path="/a"), gone))
    assert not readings
