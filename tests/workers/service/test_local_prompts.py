"""Prompts that the worker which decodes them computes itself, as a gateway asks for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from tandem.cache.plan.errors import OutOfPages
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.prefill.forwards import PromptForwards
from tandem.workers.requests.decode_request import DecodeRequest
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import prompt_message
from tests.workers.service.test_service import EPOCH, GREEDY, PROMPT, Pair, Stub, code_of, running_pair

CHUNK = 16
SETTINGS = {"scheduler.max_batch_tokens": CHUNK, "model.max_model_len": 64}
DECODE_PE = 1


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    with running_pair(folder, SETTINGS) as pair:
        yield pair


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    last: worker_pb2.GeneratedTokens = field(default_factory=worker_pb2.GeneratedTokens)

    @classmethod
    def of(cls, messages: Any) -> "Answer":
        answer = cls()
        for message in messages:
            answer.tokens += message.token_ids
            answer.logprobs += message.logprobs
            answer.last = message
        return answer


def reserve(
    worker: Stub, pe: int, request_id: str, prompt: Sequence[int] = PROMPT, max_tokens: int = 4
) -> worker_pb2.Reservation:
    request = worker_pb2.PrepareReceiveRequest(
        request_id=request_id, epoch=EPOCH, prompt=prompt_message(prompt), max_tokens=max_tokens, writer_pe=pe
    )
    return worker.PrepareReceive(request, timeout=10)


def start(worker: Stub, request_id: str, reservation: worker_pb2.Reservation, **sampling: Any) -> Any:
    request = worker_pb2.StartGenerateRequest(
        request_id=request_id, epoch=EPOCH, reservation_id=reservation.reservation_id, sampling=GREEDY
    )
    request.sampling.MergeFrom(inference_pb2.SamplingParams(**sampling))
    return worker.StartGenerate(request, timeout=30)


def generate(
    pair: Pair, request_id: str, prompt: Sequence[int] = PROMPT, max_tokens: int = 4, **sampling: Any
) -> Answer:
    """Generates on the decode worker alone."""
    reservation = reserve(pair.decode, DECODE_PE, request_id, prompt, max_tokens)
    return Answer.of(start(pair.decode, request_id, reservation, max_tokens=max_tokens, **sampling))


@pytest.mark.parametrize(
    "case", ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "deepseek_v2", "deepseek_v4", "phi3"]
)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    oracle = load_oracle(folder)
    with running_pair(folder, SETTINGS) as pair:
        for length in (3, CHUNK, 2 * CHUNK + 5):
            prompt = random_prompt(length, length)
            answer = generate(pair, f"r{length}", prompt, 6)
            assert answer.tokens == greedy(oracle, prompt, 6)
            assert answer.last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        pair.wait_until_free()


def test_a_local_reservation_has_no_map_and_no_signal(pair: Pair) -> None:
    reservation = reserve(pair.decode, DECODE_PE, "r")
    assert not reservation.HasField("position_map")
    assert (reservation.target_pe, reservation.writer_pe, reservation.generation) == (DECODE_PE, DECODE_PE, 0)
    assert reserve(pair.decode, DECODE_PE, "r") == reservation
    with pytest.raises(grpc.RpcError, match="begins with StartGenerate") as caught:
        pair.decode.RemoteSend(pair.remote_send("r", reservation), timeout=10)
    assert code_of(caught) == grpc.StatusCode.INVALID_ARGUMENT
    assert pair.abort(pair.decode, "r")
    pair.wait_until_free()


def test_either_worker_computes_and_decodes(pair: Pair, folder: Path) -> None:
    expected = greedy(load_oracle(folder), PROMPT, 4)
    assert generate(pair, "here").tokens == expected
    reservation = reserve(pair.prefill, 0, "there")
    assert Answer.of(start(pair.prefill, "there", reservation)).tokens == expected
    both = Pair(pair.decode, pair.prefill, "", pair.token)  # the other way round
    reservation = reserve(pair.prefill, DECODE_PE, "across", max_tokens=4)
    first = both.send("across", reservation).first_token
    assert [first, *both.generate("across", reservation)] == expected


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_last_message_says_how_the_prompt_was_computed(folder: Path, max_tokens: int) -> None:
    with running_pair(folder, SETTINGS | {"cache.prefix_sharing": True}) as pair:
        for cached in (0, 32):
            answer = generate(pair, f"r{cached}", PROMPT, max_tokens)
            assert answer.tokens == greedy(load_oracle(folder), PROMPT, max_tokens)
            prefilled = answer.last.prefilled
            assert (prefilled.cached_tokens, prefilled.prefill_seconds > 0) == (cached, True)
            assert prefilled.queue_seconds >= 0


def test_a_stop_on_the_first_token_ends_the_request(pair: Pair, folder: Path) -> None:
    first = greedy(load_oracle(folder), PROMPT, 1)
    answer = generate(pair, "r", stop_token_ids=first)
    assert (answer.tokens, answer.last.finish_reason) == (first, inference_pb2.FINISH_REASON_STOP)
    pair.wait_until_free()


def test_every_token_has_its_logprobs(pair: Pair) -> None:
    answer = generate(pair, "r", logprobs=2)
    assert [entry.chosen.token_id for entry in answer.logprobs] == answer.tokens
    assert all(len(entry.top) == 2 for entry in answer.logprobs)


def test_samples_are_those_of_the_other_way(pair: Pair) -> None:
    """A token depends on logits, parameters, seed and position, not on the worker that computed the prompt."""
    sampling = {"temperature": 1.0, "seed": 7}
    here = generate(pair, "here", **sampling).tokens
    request = pair.remote_send("there", pair.prepare("there"))
    request.sampling.MergeFrom(inference_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]
    first = pair.prefill.RemoteSend(request, timeout=10).first_token
    rest = Answer.of(start(pair.decode, "there", request.reservation, **sampling)).tokens
    assert here == [first, *rest]


def test_the_first_token_goes_over_the_feed(pair: Pair, folder: Path) -> None:
    feed = pair.decode.Feed(worker_pb2.FeedRequest(epoch=EPOCH, feed=5), timeout=30)
    feed.initial_metadata()
    reservation = reserve(pair.decode, DECODE_PE, "r")
    (last,) = pair.start("r", reservation, feed=5, number=3)
    tokens: list[int] = []
    while len(tokens) < last.fed:
        tokens += next(feed).token_ids
    assert [*tokens, *last.token_ids] == greedy(load_oracle(folder), PROMPT, 4)
    assert (last.fed, last.prefilled.cached_tokens) == (3, 0)
    feed.cancel()


def test_a_reader_that_goes_away_ends_the_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its first chunk is computed. A call that is cancelled sooner may never come."""
    begun, gone, launch = Event(), Event(), PromptForwards.launch

    def held(self: PromptForwards, chunks: Any, **rest: Any) -> Any:
        begun.set()
        assert gone.wait(30)
        return launch(self, chunks, **rest)

    monkeypatch.setattr(PromptForwards, "launch", held)
    stream = start(pair.decode, "r", reserve(pair.decode, DECODE_PE, "r"))
    assert begun.wait(30)
    stream.cancel()
    gone.set()
    pair.wait_until_free()


def test_a_prompt_without_room_to_grow_ends_with_an_error(
    pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is served: nothing of the first is left."""
    with monkeypatch.context() as patch:

        def narrow(self: Reservations, request: DecodeRequest) -> None:
            raise OutOfPages(1, 0)

        patch.setattr(Reservations, "narrow", narrow)
        with pytest.raises(grpc.RpcError, match="no room to decode 'full': 1 pages needed, 0 free") as caught:
            generate(pair, "full")
        assert code_of(caught) == grpc.StatusCode.INTERNAL
    pair.wait_until_free()
    assert generate(pair, "next").tokens == greedy(load_oracle(folder), PROMPT, 4)


def test_a_local_reservation_that_nobody_starts_expires(folder: Path) -> None:
    with running_pair(folder, {"island.lease_seconds": 0.05}) as pair:
        reservation = reserve(pair.decode, DECODE_PE, "r")
        pair.wait_until_free()
        with pytest.raises(grpc.RpcError, match="expired") as caught:
            Answer.of(start(pair.decode, "r", reservation))
        assert code_of(caught) == grpc.StatusCode.FAILED_PRECONDITION


def test_a_failed_forward_fails_its_requests_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = PromptForwards.launch

    def failing(self: PromptForwards, chunks: Any, **rest: Any) -> Any:
        if any(prompt.request_id == "bad" for prompt, _ in chunks):
            raise RuntimeError("no luck")
        return launch(self, chunks, **rest)

    monkeypatch.setattr(PromptForwards, "launch", failing)
    expected = greedy(load_oracle(folder), PROMPT, 24)
    with running_pair(folder, SETTINGS) as pair:
        reservation = reserve(pair.decode, DECODE_PE, "good", PROMPT, 24)
        stream = start(pair.decode, "good", reservation, max_tokens=24)
        tokens = list(next(stream).token_ids)
        with pytest.raises(grpc.RpcError, match="prefill of 'bad' failed: no luck") as caught:
            generate(pair, "bad")
        assert code_of(caught) == grpc.StatusCode.INTERNAL
        assert tokens + Answer.of(stream).tokens == expected
        pair.wait_until_free()
