"""Checks the reports of a worker, and salts, at its own service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import worker_pb2
from tandem.workers.service import reports
from tests.support.prompt_specs import prompt_message
from tests.support.waiting import until
from tests.workers.service.test_service import EPOCH, PAGE, PROMPT, Pair, code_of, running_pair


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with running_pair(folder, {"cache.prefix_sharing": True}) as pair:
        yield pair


def watch(stub: Any, epoch: int = EPOCH) -> Any:
    return stub.Watch(worker_pb2.WatchRequest(epoch=epoch), timeout=30)


def keys_of(report: worker_pb2.WorkerReport) -> set[bytes]:
    return {report.added[begin : begin + 8] for begin in range(0, len(report.added), 8)}


def serve(pair: Pair, request_id: str) -> None:
    reservation = pair.prepare(request_id)
    pair.send(request_id, reservation)
    assert len(pair.generate(request_id, reservation)) == 3


@pytest.mark.parametrize(("side", "stored"), [("prefill", len(PROMPT)), ("decode", len(PROMPT) + 3)])
def test_the_first_report_is_whole_and_later_ones_say_what_changed(pair: Pair, side: str, stored: int) -> None:
    stub = getattr(pair, side)
    stream = watch(stub)
    first = next(stream)
    assert first.whole
    assert (first.added, first.removed, first.rows, first.free_pages) == (b"", b"", 0, 16)
    serve(pair, "r")
    later = next(report for report in stream if report.added)
    stream.cancel()
    assert not later.whole
    again = watch(stub)
    whole = next(again)
    again.cancel()
    assert whole.whole
    assert len(whole.added) == 8 * (stored // PAGE)
    assert keys_of(later) <= keys_of(whole)


def test_a_report_has_the_workers_pace(pair: Pair) -> None:
    serve(pair, "r")
    figures: dict[str, worker_pb2.WorkerReport] = {}

    def measured() -> bool:
        for name, stub in (("prefill", pair.prefill), ("decode", pair.decode)):
            figures[name] = next(watch(stub))
        return figures["prefill"].prompt_tokens_per_second > 0 and figures["decode"].token_seconds > 0

    until(measured)
    assert figures["prefill"].prompt_tokens == figures["decode"].prompt_tokens == 0
    assert figures["decode"].positions == figures["decode"].rows == 0


def test_a_long_report_comes_in_parts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_KEYS", 1)
    serve(pair, "r")
    stream = watch(pair.prefill)
    parts = [next(stream) for _ in range(len(PROMPT) // PAGE)]
    stream.cancel()
    assert [part.whole for part in parts] == [True, False, False, False]
    assert len({part.added for part in parts}) == len(parts)


def test_another_epoch_is_not_watched(pair: Pair) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(watch(pair.prefill, EPOCH + 1))
    assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION


def test_salts_of_more_than_16_bytes_are_refused(pair: Pair) -> None:
    reservation, salt = pair.prepare("r"), b"x" * 17
    send = pair.remote_send("r", reservation)
    send.prompt.salt = salt
    prepare = worker_pb2.PrepareReceiveRequest(
        request_id="s", epoch=EPOCH, prompt=prompt_message(PROMPT, salt=salt), max_tokens=4
    )
    announce = worker_pb2.AnnounceRequest(request_id="t", epoch=EPOCH, prompt=prompt_message(PROMPT, salt=salt))
    for call in (
        lambda: pair.prefill.RemoteSend(send, timeout=10),
        lambda: pair.decode.PrepareReceive(prepare, timeout=10),
        lambda: list(pair.prefill.Announce(iter([announce]), timeout=10)),
    ):
        with pytest.raises(grpc.RpcError, match="salt has 17 bytes; it may have at most 16") as caught:
            call()
        assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    assert pair.abort(pair.decode, "r", writer_quiet=True)
