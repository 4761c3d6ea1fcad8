"""Calls whose values would fail a forward of many, or write where they must not: refused at the worker's service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.ports.authentication import HEADER
from tandem.workers.service.call_checks import PromptCheck
from tandem.workers.wire.messages import prompt_to_bytes
from tests.support.prompt_specs import prompt_message
from tests.workers.service.test_service import EPOCH, PROMPT, Pair, code_of, running_pair


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    with running_pair(folder) as pair:
        yield pair


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def served(pair: Pair, request_id: str) -> None:
    """A good request gets its tokens, and leaves nothing."""
    reservation = pair.prepare(request_id)
    pair.send(request_id, reservation)
    assert len(pair.generate(request_id, reservation)) == 3
    pair.wait_until_free()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prompt": worker_pb2.PromptSpec()}, "prompt has 0 bytes"),
        ({"prompt": worker_pb2.PromptSpec(token_ids=b"\0" * 7)}, "prompt has 7 bytes"),
        ({"prompt": prompt_message([2**32 - 1])}, "prompt has token 4294967295; the vocabulary"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**32 - 1}, "positions for a sequence"),
        ({"request_id": "x" * 257}, "request_id has 257 characters"),
        ({"prompt": prompt_message(PROMPT, encoder_tokens=3)}, "encoder_tokens is 3; it must be from 0 to 0"),
    ],
)
def test_a_reservation_that_cannot_be(pair: Pair, values: dict[str, Any], named: str) -> None:
    good: dict[str, Any] = {"request_id": "r", "epoch": EPOCH, "prompt": prompt_message(PROMPT), "max_tokens": 4}
    request = worker_pb2.PrepareReceiveRequest(**(good | values))
    assert named in refused(lambda: pair.decode.PrepareReceive(request, timeout=10))
    served(pair, f"after {named}")


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": 1.0}, "sampling.seed is missing"),
        ({"temperature": float("nan"), "seed": 1}, "sampling.temperature is nan"),
        ({"logprobs": 10_000}, "sampling.logprobs is 10000"),
    ],
)
def test_sampling_that_cannot_be(pair: Pair, sampling: dict[str, Any], named: str) -> None:
    request_id = f"sampling {named}"
    reservation = pair.prepare(request_id)
    send = pair.remote_send(request_id, reservation)
    send.sampling.CopyFrom(inference_pb2.SamplingParams(max_tokens=4, **sampling))
    start = worker_pb2.StartGenerateRequest(
        request_id=request_id, epoch=EPOCH, reservation_id=reservation.reservation_id, sampling=send.sampling
    )
    assert named in refused(lambda: pair.prefill.RemoteSend(send, timeout=10))
    assert named in refused(lambda: list(pair.decode.StartGenerate(start, timeout=10)))
    assert pair.abort(pair.decode, request_id, writer_quiet=True)
    served(pair, f"after {named}")


def test_a_token_that_is_none_fails_nobody_else(pair: Pair) -> None:
    reservation = pair.prepare("token")
    send = pair.remote_send("token", reservation)
    send.prompt.token_ids = prompt_to_bytes([5, 100_000, 7])
    assert "prompt has token 100000" in refused(lambda: pair.prefill.RemoteSend(send, timeout=10))
    assert pair.abort(pair.decode, "token", writer_quiet=True)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"\x0a\x01r\x10\x01\x32\x05\x0a\x03abc", "prompt has 3 bytes"),
        (b"\x0a\x01r\x10\x01\x78\x01", "AnnounceRequest has unknown field number 15"),
        (b"\x0a\x09r", "3 bytes of the request cannot be read"),
    ],
)
def test_announcements_that_are_none(pair: Pair, message: bytes, named: str) -> None:
    good = worker_pb2.AnnounceRequest(request_id=f"announced {named}", epoch=EPOCH, prompt=prompt_message(PROMPT))
    with grpc.insecure_channel(pair.prefill_address) as channel:
        announce = channel.stream_stream("/tandem.v1.Worker/Announce")
        metadata = ((HEADER, f"Bearer {pair.token}"),)
        stream = announce(iter([good.SerializeToString(), message]), metadata=metadata, timeout=10)
        assert named in refused(lambda: list(stream))
    assert pair.abort(pair.prefill, f"announced {named}")
    served(pair, f"after {named}")


def test_pages_that_its_receiver_did_not_offer_are_not_written(pair: Pair) -> None:
    """Each map is in order by itself; only the seal tells that it is not the one that was offered."""
    mine, other = pair.prepare("mine"), pair.prepare("other")
    assert mine.position_map.runs != other.position_map.runs
    changed = worker_pb2.Reservation()
    changed.CopyFrom(mine)
    changed.position_map.CopyFrom(other.position_map)
    assert "seal" in refused(pair.send, "mine", changed)
    assert pair.abort(pair.decode, "other", writer_quiet=True)
    pair.send("mine", mine)
    assert len(pair.generate("mine", mine)) == 3


@pytest.mark.parametrize(
    ("tokens", "encoder_tokens", "named"),
    [
        (20, 0, "encoder_tokens is 0; it must be from 1 to "),
        (20, 2**32 - 1, "encoder_tokens is 4294967295; it must be from 1 to "),
        (16, 9, "prompt has 16 tokens; the encoder's take up 16, and at least one must follow"),
    ],
)
def test_prompts_of_an_encoder_that_cannot_be(tokens: int, encoder_tokens: int, named: str) -> None:
    check = PromptCheck(vocab_size=10, max_model_len=100, most_encoder=64, page_size=8)
    with pytest.raises(InvalidCall, match=named):
        check(worker_pb2.AnnounceRequest(prompt=prompt_message([0] * tokens, encoder_tokens=encoder_tokens)))
    good = check(worker_pb2.AnnounceRequest(prompt=prompt_message([0] * 17, encoder_tokens=9)))
    assert good.encoder == (9, 16)
