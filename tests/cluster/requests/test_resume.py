"""Requests that go on after a loss: each token once, and those that the lost call would have given."""

from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.requests.validation import ModelLimits, RequestValidator
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import PROMPT, TOKENS, open_gateway
from tests.support.waiting import until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    make_checkpoint(folder := tmp_path_factory.mktemp("resume"))
    return folder


def request(*received: int) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(request_id="one")
    message.token_ids.ids.extend(PROMPT)
    message.sampling.max_tokens = len(TOKENS)
    if received:
        message.resume.token_ids.extend(received)
    return message


def tokens_of(address: str, message: inference_pb2.GenerateRequest) -> list[int]:
    with grpc.insecure_channel(address) as channel:
        call: Any = inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=60)
        return [token for update in call for token in update.token_ids]


def failure(address: str, message: inference_pb2.GenerateRequest) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        tokens_of(address, message)
    return caught.value


@pytest.mark.parametrize("count", [1, 4])
def test_what_a_client_has_is_prompt_and_is_not_sent_again(model: Path, count: int) -> None:
    with open_gateway(model) as opened:
        assert tokens_of(opened.grpc, request(*TOKENS[:count])) == TOKENS[count:]
        assert opened.worker.prompts == [PROMPT + TOKENS[:count]]


def test_what_was_sent_is_prompt_after_a_loss_and_no_token_comes_twice(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.cluster.routing.worker_link.AVOID_SECONDS", 0.0)
    with open_gateway(model, fails={"StartGenerate": ["go on", "UNAVAILABLE"]}) as opened:
        assert tokens_of(opened.grpc, request()) == TOKENS
        assert opened.worker.prompts == [PROMPT + TOKENS[:count] for count in (0, 2)]


def test_attempts_are_bounded(model: Path) -> None:
    """A request that ends its workers must not end all others, too."""
    losses = {"StartGenerate": ["UNAVAILABLE"]}
    with open_gateway(model, {"gateway.max_attempts": 1}, fails=losses) as opened:
        error = failure(opened.grpc, request())
        assert error.code() == grpc.StatusCode.ABORTED
        assert "in each of 1 attempts (gateway.max_attempts)" in error.details()
        assert opened.worker.prompts == [PROMPT]


def test_a_forward_that_fails_twice_is_not_tried_again(model: Path) -> None:
    """The second failure is the request's own, and each failed forward costs others theirs."""
    with open_gateway(model, fails={"RemoteSend": ["INTERNAL"] * 2}) as opened:
        assert failure(opened.grpc, request()).code() == grpc.StatusCode.INTERNAL
        assert opened.worker.prompts == [PROMPT] * 2


def test_an_id_that_runs_is_refused_and_its_request_goes_on(model: Path) -> None:
    with open_gateway(model, alone=True) as opened, ThreadPoolExecutor(2) as pool:
        first = pool.submit(tokens_of, opened.grpc, request())
        until(lambda: opened.running)
        second = pool.submit(tokens_of, opened.grpc, request())
        ended, _ = wait((first, second), return_when=FIRST_COMPLETED)
        opened.island_comes()
        assert ended == {second}
        error: Any = second.exception()
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id 'one' is in use" in error.details()
        assert first.result() == TOKENS


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    """A replay draws the same tokens by it, whichever workers it gets."""
    validator = RequestValidator(ModelLimits(vocab_size=100, max_model_len=100, pool_tokens=100), None)
    seeds = [validator.validate(request()).params.seed for _ in range(3)]
    assert None not in seeds
    assert len(set(seeds)) == 3


def test_a_seed_that_is_given_is_kept() -> None:
    validator = RequestValidator(ModelLimits(vocab_size=100, max_model_len=100, pool_tokens=100), None)
    message = request()
    message.sampling.seed = 7
    message.sampling.n = 2
    valid = validator.validate(message)
    assert [valid.answer(index).params.seed for index in range(2)] == [7, 8]
