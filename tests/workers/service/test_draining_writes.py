"""Draining writes, through the service of a worker: what its callers hear, and when pages come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tandem.proto import inference_pb2, inference_pb2_grpc, worker_pb2
from tandem.transfer.errors import PeerGone
from tandem.workers.handoff import draining
from tandem.workers.ports.authentication import authorized
from tests.support.fake_transport import FakeFabric, FakeTransport
from tests.support.island import FakeIsland, running_island
from tests.support.oracle import greedy, load_oracle
from tests.support.waiting import until
from tests.workers.service.test_service import EPOCH, GREEDY, PROMPT, Pair, Stub, code_of

PREFILL, DECODE = 0, 1
NUM_PAGES, CHUNK = 16, 8
SETTINGS = {
    "cache.num_pages": NUM_PAGES,
    "cache.prefix_sharing": False,
    "scheduler.max_batch_tokens": CHUNK,
    "gateway.max_attempts": 1,
}


@dataclass
class FakePair:
    """An island on a fake fabric, and stubs of its workers."""

    fabric: FakeFabric
    calls: Pair
    gateway: str

    def remote_send(self, request_id: str, reservation: worker_pb2.Reservation) -> grpc.Future:
        return self.calls.sending(request_id, reservation)

    def free_pages(self, stub: Stub) -> int:
        return self.calls.status(stub).free_pages


@pytest.fixture
def pair(folder: Path) -> Iterator[FakePair]:
    with fake_pair(folder) as found:
        yield found
        found.fabric.release(DECODE)
        until(lambda: found.free_pages(found.calls.prefill) == NUM_PAGES)


@contextmanager
def fake_pair(folder: Path) -> Iterator[FakePair]:
    transports = FakeIsland()
    with running_island(folder, SETTINGS, transports) as island:
        addresses = [worker.address for worker in island.workers]
        token = island.workers[0].config.token
        with grpc.insecure_channel(addresses[0]) as one, grpc.insecure_channel(addresses[1]) as other:
            stubs = Pair(authorized(Stub(one), token), authorized(Stub(other), token), addresses[0], token)
            yield FakePair(transports.fabric, stubs, island.address)


def test_a_request_on_the_fake_fabric(pair: FakePair, folder: Path) -> None:
    reservation = pair.calls.prepare("r")
    first = pair.remote_send("r", reservation).result().first_token
    assert [first, *pair.calls.generate("r", reservation)] == greedy(load_oracle(folder), PROMPT, 4)


def test_a_chunk_does_not_wait_for_the_push_of_the_one_before(pair: FakePair) -> None:
    pair.fabric.hold(DECODE)
    reservation = pair.calls.prepare("r")
    sending = pair.remote_send("r", reservation)
    num_chunks = -(-len(PROMPT) // CHUNK)
    until(lambda: pair.fabric.num_in_flight(DECODE) == num_chunks)  # of a page each
    assert not sending.done()
    assert pair.calls.status(pair.calls.prefill).running == 1
    pair.fabric.release(DECODE)
    assert sending.result().bytes_pushed > 0
    assert len(pair.calls.generate("r", reservation)) == 3


def test_a_push_that_does_not_drain_in_time_is_not_called_quiet(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "QUIET_SECONDS", 0)
    pair.fabric.hold(DECODE)
    reservation = pair.calls.prepare("r")
    for call in (
        lambda: pair.remote_send("r", reservation).result(),
        lambda: pair.calls.abort(pair.calls.prefill, "r"),
    ):
        with pytest.raises(grpc.RpcError, match="'r': writes to PE 1 may still land after 0 s") as caught:
            call()
        assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
    assert pair.free_pages(pair.calls.prefill) < NUM_PAGES  # writes may still read them
    pair.fabric.release(DECODE)
    pair.calls.abort(pair.calls.prefill, "r")
    assert pair.free_pages(pair.calls.prefill) == NUM_PAGES


def test_a_push_waits_for_a_link_that_is_down_unless_it_is_aborted(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "QUIET_SECONDS", 0)
    monkeypatch.setattr(FakeTransport, "silent_seconds", 600.0)
    pair.fabric.hold(DECODE)
    num_chunks = -(-len(PROMPT) // CHUNK)
    sending = pair.remote_send("r", pair.calls.prepare("r"))
    until(lambda: pair.fabric.num_in_flight(DECODE) == num_chunks)
    assert pair.calls.status(pair.calls.prefill).running == 1  # comes between two steps
    assert not sending.done()
    pair.fabric.release(DECODE)
    assert sending.result().bytes_pushed > 0
    pair.fabric.hold(DECODE)
    sending = pair.remote_send("s", pair.calls.prepare("s"))
    until(lambda: pair.fabric.num_in_flight(DECODE) == num_chunks)
    with pytest.raises(grpc.RpcError, match="may still land"):
        pair.calls.abort(pair.calls.prefill, "s")
    assert sending.exception() is not None


@pytest.mark.parametrize("held", [False, True])
def test_a_forward_that_fails_ends_its_request_once_its_writes_are_quiet(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    if held:
        monkeypatch.setattr(draining, "QUIET_SECONDS", 0)
        pair.fabric.hold(DECODE)
    pair.fabric.fail_next("write_slots", DECODE)
    pair.fabric.fail_next("fence", DECODE)
    pair.fabric.fail_next("is_quiet", DECODE)
    sending = pair.remote_send("r", pair.calls.prepare("r"))
    with pytest.raises(grpc.RpcError, match="may still land" if held else "prefill of 'r' failed") as caught:
        sending.result()
    assert code_of(caught) == (grpc.StatusCode.UNAVAILABLE if held else grpc.StatusCode.INTERNAL)


def test_a_request_that_loses_its_peer_is_lost_and_not_failed(pair: FakePair) -> None:
    """So the gateway places it again, however often."""
    pair.fabric.fail_next("write_slots", DECODE, PeerGone("PE 1: a connection from it is lost"))
    with pytest.raises(grpc.RpcError, match="prefill of 'r' failed: PE 1: a connection") as caught:
        pair.remote_send("r", pair.calls.prepare("r")).result()
    assert code_of(caught) == grpc.StatusCode.UNAVAILABLE


def test_nothing_is_reserved_for_a_peer_that_is_lost(pair: FakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lost:
        lost.setattr(FakeTransport, "lost", "PE 0: a connection from it is lost")
        with pytest.raises(grpc.RpcError, match="nothing can come from PE 0: PE 0: a connection") as caught:
            pair.calls.prepare("r")
        assert code_of(caught) == grpc.StatusCode.UNAVAILABLE
    assert pair.free_pages(pair.calls.decode) == NUM_PAGES


def test_an_abort_is_answered_once_all_writes_have_drained(pair: FakePair) -> None:
    pair.fabric.hold(DECODE)
    sending = pair.remote_send("r", pair.calls.prepare("r"))
    until(lambda: pair.fabric.num_in_flight(DECODE) > 0)
    request = worker_pb2.AbortRequest(request_id="r", epoch=EPOCH)
    with pytest.raises(grpc.RpcError) as caught:
        pair.calls.prefill.Abort(request, timeout=0.5)
    assert code_of(caught) == grpc.StatusCode.DEADLINE_EXCEEDED
    pair.fabric.release(DECODE)
    pair.calls.abort(pair.calls.prefill, "r")
    assert pair.fabric.num_in_flight(DECODE) == 0
    error = sending.exception()
    assert error is None or "was aborted" in str(error)  # None: the abort came after the last chunk


def test_the_gateway_frees_no_page_that_may_still_be_written(pair: FakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "QUIET_SECONDS", 0)
    pair.fabric.hold(DECODE)
    request = inference_pb2.GenerateRequest(
        request_id="r", token_ids=inference_pb2.TokenIds(ids=PROMPT), sampling=GREEDY
    )
    with (
        grpc.insecure_channel(pair.gateway) as channel,
        pytest.raises(grpc.RpcError, match="may still land") as caught,
    ):
        list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20))
    assert code_of(caught) == grpc.StatusCode.ABORTED
    decode = pair.calls.decode
    until(lambda: pair.calls.status(decode).draining_pages > 0)
    assert pair.free_pages(decode) < NUM_PAGES
    pair.fabric.release(DECODE)
    until(lambda: pair.free_pages(decode) == NUM_PAGES)
