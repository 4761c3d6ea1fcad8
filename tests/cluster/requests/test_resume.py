"""Requests that go on after a loss: each token once, and those that the lost call would have given."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cluster.requests.validation import ModelLimits, RequestValidator
from tandem.proto import inference_pb2, inference_pb2_grpc
from tests.cluster.open_gateway import PROMPT, TOKENS, open_gateway
from tests.support.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("resume"))


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


@pytest.mark.parametrize("count", [1, 4])
def test_what_a_client_has_is_prompt_and_is_not_sent_again(model: Path, count: int) -> None:
    with open_gateway(model) as opened:
        assert tokens_of(opened.grpc, request(*TOKENS[:count])) == TOKENS[count:]
        assert opened.worker.prompts == [PROMPT + TOKENS[:count]]


def test_what_was_sent_is_prompt_after_a_loss_and_no_token_comes_twice(model: Path) -> None:
    with open_gateway(model, fails={"StartGenerate": ["go on", "UNAVAILABLE"]}) as opened:
        assert tokens_of(opened.grpc, request()) == TOKENS
        assert opened.worker.prompts == [PROMPT + TOKENS[:count] for count in (0, 2)]


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
