"""The worker service itself, as the gateway speaks to it: idempotence, epochs, bad maps, draining."""

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import inference_pb2, worker_pb2, worker_pb2_grpc
from tandem.transfer.factory import create_transport
from tandem.workers import worker
from tandem.workers.ports.authentication import authorized
from tandem.workers.service.services import WorkerService
from tandem.workers.steps.step_loop import StepLoop
from tests.support.checkpoints import save_checkpoint
from tests.support.island import FakeIsland, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import prompt_message

EPOCH, PAGE = 1, 8
GREEDY = inference_pb2.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)
PROMPT = random_prompt(37, 0)
Stub = worker_pb2_grpc.WorkerStub


class Pair:
    """Both workers of a small island, and calls with the usual arguments."""

    def __init__(self, prefill: Stub, decode: Stub, prefill_address: str, token: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.prefill_address = prefill_address
        self.token = token

    def prepare(self, request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 4) -> worker_pb2.Reservation:
        request = worker_pb2.PrepareReceiveRequest(
            request_id=request_id, epoch=EPOCH, prompt=prompt_message(prompt), max_tokens=max_tokens
        )
        return self.decode.PrepareReceive(request, timeout=10)

    def remote_send(self, request_id: str, reservation: worker_pb2.Reservation) -> worker_pb2.RemoteSendRequest:
        return worker_pb2.RemoteSendRequest(
            request_id=request_id,
            epoch=EPOCH,
            prompt=prompt_message(PROMPT),
            sampling=GREEDY,
            reservation=reservation,
        )

    def send(self, request_id: str, reservation: worker_pb2.Reservation) -> worker_pb2.RemoteSendResponse:
        return self.prefill.RemoteSend(self.remote_send(request_id, reservation), timeout=10)

    def sending(self, request_id: str, reservation: worker_pb2.Reservation) -> grpc.Future:
        """A RemoteSend under way."""
        return self.prefill.RemoteSend.future(self.remote_send(request_id, reservation), timeout=30)

    def start(
        self, request_id: str, reservation: worker_pb2.Reservation, max_tokens: int = 4, feed: int = 0, number: int = 0
    ) -> Any:
        request = worker_pb2.StartGenerateRequest(
            request_id=request_id,
            epoch=EPOCH,
            reservation_id=reservation.reservation_id,
            sampling=GREEDY,
            feed=feed,
            number=number,
        )
        request.sampling.max_tokens = max_tokens
        return self.decode.StartGenerate(request, timeout=10)

    def generate(self, request_id: str, reservation: worker_pb2.Reservation, max_tokens: int = 4) -> list[int]:
        return [token for message in self.start(request_id, reservation, max_tokens) for token in message.token_ids]

    def abort(self, stub: Stub, request_id: str, writer_quiet: bool = False) -> bool:
        request = worker_pb2.AbortRequest(request_id=request_id, epoch=EPOCH, writer_quiet=writer_quiet)
        return stub.Abort(request, timeout=10).known

    def status(self, stub: Stub) -> inference_pb2.WorkerInfo:
        return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)

    def wait_until_free(self) -> None:
        """Returns when the decode worker holds no page; the test's own timeout bounds it."""
        while True:
            info = self.status(self.decode)
            if info.free_pages == info.num_pages and not info.waiting:
                return


@contextmanager
def running_pair(
    folder: Path, overrides: dict[str, Any] | None = None, transports: FakeIsland | None = None
) -> Iterator[Pair]:
    settings = {"cache.num_pages": 16, "cache.prefix_sharing": False, **(overrides or {})}
    with running_island(folder, settings, transports or create_transport) as island:
        addresses = [worker.address for worker in island.workers]
        token = island.workers[0].config.token
        with grpc.insecure_channel(addresses[0]) as one, grpc.insecure_channel(addresses[1]) as other:
            yield Pair(authorized(Stub(one), token), authorized(Stub(other), token), addresses[0], token)
        assert all(worker.cache.pages.free == 16 for worker in island.workers)


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with running_pair(folder) as pair:
        yield pair


def code_of(caught: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    return caught.value.code()


def test_one_request_without_a_gateway(pair: Pair, folder: Path) -> None:
    reservation = pair.prepare("r")
    first = pair.send("r", reservation).first_token
    assert [first, *pair.generate("r", reservation)] == greedy(load_oracle(folder), PROMPT, 4)


def test_prepare_twice_is_one_reservation(pair: Pair) -> None:
    reservation = pair.prepare("r")
    assert pair.prepare("r") == reservation
    assert pair.status(pair.decode).free_pages == 16 - reservation.pages
    assert pair.abort(pair.decode, "r", writer_quiet=True)


def test_a_doubled_remote_send_is_computed_once(pair: Pair) -> None:
    reservation = pair.prepare("r")
    request = pair.remote_send("r", reservation)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(pair.prefill.RemoteSend, request, timeout=10) for _ in range(2)]
    one, other = (call.result() for call in calls)
    assert one.first_token == other.first_token
    assert len(pair.generate("r", reservation)) == 3


def test_an_announced_prompt_gets_its_first_token_before_all_has_landed(folder: Path) -> None:
    transports = FakeIsland()
    with running_pair(folder, transports=transports) as pair:
        announcements: queue.SimpleQueue[worker_pb2.AnnounceRequest | None] = queue.SimpleQueue()
        first_tokens = pair.prefill.Announce(iter(announcements.get, None), timeout=30)
        for number in range(2):
            request_id = f"r{number}"
            announcements.put(
                worker_pb2.AnnounceRequest(request_id=request_id, epoch=EPOCH, prompt=prompt_message(PROMPT))
            )
            while not pair.status(pair.prefill).waiting:
                pass
            reservation = pair.prepare(request_id)
            transports.fabric.hold(1)
            call = pair.sending(request_id, reservation)
            first = next(first_tokens)
            assert (first.request_id, first.token_id) == (request_id, greedy(load_oracle(folder), PROMPT, 1)[0])
            assert not call.done()
            transports.fabric.release(1)
            assert call.result().first_token == first.token_id
            assert len(pair.generate(request_id, reservation)) == 3
        announcements.put(None)
        assert not list(first_tokens)


def test_tokens_before_the_last_go_over_the_feed_that_a_request_names(pair: Pair, folder: Path) -> None:
    feed = pair.decode.Feed(worker_pb2.FeedRequest(epoch=EPOCH, feed=5), timeout=30)
    feed.initial_metadata()  # it is open
    expected = greedy(load_oracle(folder), PROMPT, 4)
    for number in (1, 2):
        reservation = pair.prepare(f"r{number}")
        pair.send(f"r{number}", reservation)
        (last,) = pair.start(f"r{number}", reservation, feed=5, number=number)
        assert (list(last.token_ids), last.finish_reason, last.fed) == (expected[3:], 2, 2)
        numbers, token_ids = [], []
        while len(token_ids) < last.fed:
            message = next(feed)
            numbers += message.numbers
            token_ids += message.token_ids
        assert (numbers, token_ids) == ([number] * 2, expected[1:3])
    reservation = pair.prepare("elsewhere")
    pair.send("elsewhere", reservation)
    messages = list(pair.start("elsewhere", reservation, feed=6))
    assert [token for message in messages for token in message.token_ids] == expected[1:]
    feed.cancel()


@pytest.mark.parametrize(
    ("number", "epoch", "code"),
    [(5, EPOCH, "ALREADY_EXISTS"), (0, EPOCH, "INVALID_ARGUMENT"), (6, 2, "FAILED_PRECONDITION")],
)
def test_a_feed_that_cannot_be_opened(pair: Pair, number: int, epoch: int, code: str) -> None:
    feed = pair.decode.Feed(worker_pb2.FeedRequest(epoch=EPOCH, feed=5), timeout=30)
    feed.initial_metadata()
    with pytest.raises(grpc.RpcError, match=f"feed {number}|feed is 0|epoch") as caught:
        next(pair.decode.Feed(worker_pb2.FeedRequest(epoch=epoch, feed=number), timeout=30))
    assert code_of(caught) == grpc.StatusCode[code]
    feed.cancel()


def test_no_room_is_resource_exhausted_and_holds_nothing(pair: Pair) -> None:
    pair.prepare("first", max_tokens=60)
    with pytest.raises(grpc.RpcError) as caught:
        pair.prepare("second")
    assert code_of(caught) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert pair.abort(pair.decode, "first", writer_quiet=True)
    assert pair.status(pair.decode).free_pages == 16


def test_more_than_the_pool_is_invalid(pair: Pair) -> None:
    with pytest.raises(grpc.RpcError, match="16") as caught:
        pair.prepare("r", max_tokens=200)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT


def test_a_cancelled_reservation_is_taken_back_from_its_writer(pair: Pair) -> None:
    """The gateway does not help: the two workers settle it between themselves, and a late RemoteSend is refused."""
    reservation = pair.prepare("r")
    assert pair.abort(pair.decode, "r")
    pair.wait_until_free()
    with pytest.raises(grpc.RpcError, match="recalled") as caught:
        pair.send("r", reservation)
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
    assert pair.status(pair.prefill).counters.stale_calls == 1
    assert pair.status(pair.prefill).counters.recalled == pair.status(pair.decode).counters.recalled == 1


def test_a_reservation_that_nobody_starts_expires(folder: Path) -> None:
    with running_pair(folder, {"island.lease_seconds": 0.05}) as pair:
        reservation = pair.prepare("r")
        pair.wait_until_free()
        assert pair.status(pair.decode).counters.expired_leases == 1
        with pytest.raises(grpc.RpcError, match="expired") as caught:
            pair.generate("r", reservation)
        assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
        assert pair.status(pair.decode).counters.stale_calls == 1


def test_a_send_that_nobody_waits_for_stops_when_its_lease_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = FakeIsland()
    passed, gone = [0.0], threading.Event()
    remote_send = WorkerService.RemoteSend

    async def noted(*arguments: Any) -> worker_pb2.RemoteSendResponse:
        try:
            return await remote_send(*arguments)
        finally:
            gone.set()

    monkeypatch.setattr(WorkerService, "RemoteSend", noted)
    monkeypatch.setattr(worker, "StepLoop", partial(StepLoop, clock=lambda: time.monotonic() + passed[0]))
    lease = 100.0  # so that it is over when the test says so, and no sooner
    settings = {"island.lease_seconds": lease, "scheduler.max_batch_tokens": 8}
    with running_pair(folder, settings, transports) as pair:
        second_chunk = transports.fabric.pause_next("write_slots", 1, skip=1)
        third_chunk = transports.fabric.pause_next("write_slots", 1)
        reservation = pair.prepare("r")
        reader = pair.start("r", reservation)  # keeps the receiver from taking it back
        call = pair.sending("r", reservation)
        assert second_chunk.entered.wait(30)
        call.cancel()
        assert gone.wait(30)  # the lease runs from the next command on, which comes before the third chunk
        second_chunk.resume()
        assert third_chunk.entered.wait(30)
        passed[0] = lease
        third_chunk.resume()
        while pair.status(pair.prefill).counters.expired_leases == 0:
            pass
        assert pair.status(pair.prefill).free_pages == 16
        reader.cancel()
        pair.wait_until_free()


@pytest.mark.parametrize("case", ["llama", "gemma3"])  # of which most layers have a window
def test_corrupt_kv_is_data_loss(case: str, tmp_path: Path) -> None:
    transports = FakeIsland()
    with running_pair(save_checkpoint(case, tmp_path), transports=transports) as pair:
        transports.fabric.corrupt_next(1)
        reservation = pair.prepare("r")
        pair.send("r", reservation)
        with pytest.raises(grpc.RpcError, match="has digest") as caught:
            pair.generate("r", reservation)
        assert code_of(caught) == grpc.StatusCode.DATA_LOSS
        assert pair.status(pair.decode).counters.corrupt == 1


def test_remote_send_after_its_abort_writes_nothing(pair: Pair) -> None:
    reservation = pair.prepare("r")
    assert not pair.abort(pair.prefill, "r")
    with pytest.raises(grpc.RpcError) as caught:
        pair.send("r", reservation)
    assert code_of(caught) == grpc.StatusCode.ABORTED
    assert pair.abort(pair.decode, "r", writer_quiet=True)


def test_a_reader_that_goes_away_ends_the_request(pair: Pair) -> None:
    reservation = pair.prepare("r")
    stream = pair.start("r", reservation)
    while pair.status(pair.decode).waiting != 1:
        pass
    stream.cancel()
    pair.wait_until_free()


def test_more_tokens_than_were_reserved_are_refused(pair: Pair, folder: Path) -> None:
    """They would take pages that others count on; the reservation can still be used."""
    reservation = pair.prepare("r", max_tokens=3)
    first = pair.send("r", reservation).first_token
    with pytest.raises(grpc.RpcError, match=r"sampling\.max_tokens is 4; pages are reserved for 3") as caught:
        pair.generate("r", reservation)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    assert [first, *pair.generate("r", reservation, 3)] == greedy(load_oracle(folder), PROMPT, 3)


def test_calls_of_another_epoch_are_refused(pair: Pair) -> None:
    other = {"request_id": "r", "epoch": EPOCH + 1}
    for call in (
        lambda: pair.decode.PrepareReceive(worker_pb2.PrepareReceiveRequest(**other), timeout=10),
        lambda: list(pair.decode.StartGenerate(worker_pb2.StartGenerateRequest(**other), timeout=10)),
        lambda: pair.decode.Abort(worker_pb2.AbortRequest(**other), timeout=10),
        lambda: pair.prefill.RemoteSend(worker_pb2.RemoteSendRequest(**other), timeout=10),
    ):
        with pytest.raises(grpc.RpcError, match="epoch is 2") as caught:
            call()
        assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
    assert pair.status(pair.decode).counters.stale_calls == 3
    assert pair.status(pair.prefill).counters.stale_calls == 1


def test_a_map_of_another_epoch_is_refused(pair: Pair) -> None:
    reservation = pair.prepare("r")
    reservation.epoch = EPOCH + 1
    with pytest.raises(grpc.RpcError, match="epoch") as caught:
        pair.send("r", reservation)
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION
    assert pair.abort(pair.decode, "r", writer_quiet=True)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("target_pe", 2, "target_pe is 2"),
        ("writer_pe", 1, "writer_pe is 1; this worker is PE 0"),
        ("lease_seconds", 0, "lease_seconds is 0"),
        ("lease_seconds", float("nan"), "lease_seconds is nan"),
        ("signal_slot", 256, "signal_slot is 256; it must be from 0 to 255"),
        ("signal_slot", 100_000, "signal_slot"),
        ("matched_tokens", 37, "matched_tokens"),
        ("matched_tokens", 5, "start_position is 0; 5 is expected"),
    ],
)
def test_a_bad_reservation_fails_its_request_only(pair: Pair, field: str, value: int, named: str) -> None:
    good = pair.prepare("good")
    bad = worker_pb2.Reservation()
    bad.CopyFrom(good)
    setattr(bad, field, value)
    with pytest.raises(grpc.RpcError, match=named) as caught:
        pair.send("bad", bad)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    pair.send("good", good)
    assert len(pair.generate("good", good)) == 3


@pytest.mark.parametrize("runs", [b"", b"\xff" * 40, b"\x00"])
def test_a_map_that_is_none_fails_its_request_only(pair: Pair, runs: bytes) -> None:
    good = pair.prepare("good")
    bad = worker_pb2.Reservation()
    bad.CopyFrom(good)
    bad.position_map.runs[0] = runs
    with pytest.raises(grpc.RpcError) as caught:
        pair.send("bad", bad)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    pair.send("good", good)
    assert len(pair.generate("good", good)) == 3


def test_a_layout_that_differs_is_refused(pair: Pair) -> None:
    reservation = pair.prepare("r")
    reservation.position_map.layout_fingerprint ^= 1
    with pytest.raises(grpc.RpcError, match="fingerprint"):
        pair.send("r", reservation)
    assert pair.abort(pair.decode, "r", writer_quiet=True)


def test_the_server_of_a_worker_that_leaves_ends_on_its_event_loop(folder: Path) -> None:
    """On another thread gRPC would close a socket that the loop may just be about to read: `Bad file descriptor`."""
    threads: list[str] = []
    with running_island(folder, {"cache.num_pages": 16}, FakeIsland()) as island:
        leaving = island.workers[1]
        weakref.finalize(leaving._server, lambda: threads.append(threading.current_thread().name))
        leaving.leave()
        assert threads == ["grpc"]
