"""Checks that a lost gateway's requests on the workers end at once, and are refused when they arrive late."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tandem.workers.ports.authentication import authorized
from tandem.workers.worker import Worker
from tests.support.fake_transport import FakeFabric
from tests.support.island import FakeIsland, running_island
from tests.workers.service.test_service import Pair, Stub, code_of

DECODE, NUM_PAGES = 1, 16


@pytest.fixture
def island(folder: Path) -> Iterator[tuple[Pair, FakeFabric, Worker, Worker]]:
    transports = FakeIsland()
    settings = {"cache.num_pages": NUM_PAGES, "cache.prefix_sharing": False}
    with running_island(folder, settings, transports) as running:
        prefill, decode = running.workers
        with grpc.insecure_channel(prefill.address) as one, grpc.insecure_channel(decode.address) as other:
            token = prefill.config.token
            pair = Pair(authorized(Stub(one), token), authorized(Stub(other), token), prefill.address, token)
            yield pair, transports.fabric, prefill, decode


def test_only_the_lost_gateways_requests_end(island: tuple[Pair, FakeFabric, Worker, Worker]) -> None:
    pair, _, prefill, decode = island
    pair.prepare("1.1/a")
    kept = pair.prepare("11.1/b")
    prefill.release("1.", False)
    decode.release("1.", True)
    assert pair.status(pair.decode).free_pages == NUM_PAGES - kept.pages
    first = pair.send("11.1/b", kept).first_token
    assert len([first, *pair.generate("11.1/b", kept)]) == 4
    assert pair.status(pair.decode).free_pages == NUM_PAGES


def test_what_arrives_late_is_refused(island: tuple[Pair, FakeFabric, Worker, Worker]) -> None:
    """Its pages are free by then: a push would write into somebody else's KV."""
    pair, _, prefill, decode = island
    reservation = pair.prepare("1.1/a")
    prefill.release("1.", False)
    decode.release("1.", True)
    with pytest.raises(grpc.RpcError, match="aborted") as caught:
        pair.send("1.1/a", reservation)
    assert code_of(caught) == grpc.StatusCode.ABORTED
    with pytest.raises(grpc.RpcError, match="aborted"):
        pair.prepare("1.2/b")
    assert pair.status(pair.decode).free_pages == NUM_PAGES


def test_the_sender_answers_once_its_writes_have_landed(island: tuple[Pair, FakeFabric, Worker, Worker]) -> None:
    pair, fabric, prefill, _ = island
    reservation = pair.prepare("1.1/a")
    fabric.hold(DECODE)
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(pair.send, "1.1/a", reservation)
        while not fabric.num_in_flight(DECODE):
            time.sleep(0.001)
        released = pool.submit(prefill.release, "1.", False)
        with pytest.raises(TimeoutError):
            released.result(0.3)
        fabric.release(DECODE)
        released.result(20)
        sent.exception(20)
