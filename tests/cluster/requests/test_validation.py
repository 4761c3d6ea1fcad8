"""The request validator, where a running gateway is not needed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.protocol import MAX_MESSAGES
from tandem.cluster.requests.validation import MAX_REQUEST_ID, ModelLimits, RequestValidator
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2

LIMITS = ModelLimits(vocab_size=9, max_model_len=100, pool_tokens=100)


def test_token_ids_come_as_numbers_or_as_bytes() -> None:
    validator = RequestValidator(LIMITS, None)
    numbers, packed = inference_pb2.GenerateRequest(), inference_pb2.GenerateRequest()
    numbers.token_ids.ids.extend([8, 0, 5])
    packed.token_bytes = bytes([8, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0])
    for message in (numbers, packed):
        message.sampling.max_tokens = 1
        assert validator.validate(message).prompt.token_ids.tolist() == [8, 0, 5]


@pytest.mark.parametrize(
    ("token_bytes", "reason"),
    [
        (b"", "token_bytes has 0 bytes; it must have one token id or more, of 4 bytes each"),
        (bytes(6), "token_bytes has 6 bytes"),
        (bytes([1, 0, 0, 0, 9, 0, 0, 0]), r"token_bytes\[1\] is 9; the vocabulary has 9"),
        (bytes([255] * 4), r"token_bytes\[0\] is 4294967295"),
    ],
)
def test_bytes_that_are_no_token_ids_are_refused(token_bytes: bytes, reason: str) -> None:
    message = inference_pb2.GenerateRequest(token_bytes=token_bytes)
    message.sampling.max_tokens = 1
    with pytest.raises(InvalidRequest, match=reason):
        RequestValidator(LIMITS, None).validate(message)


@pytest.mark.parametrize(
    ("fork", "options", "encoder", "reason"),
    [
        ({}, {}, 0, "fork.request_id is empty; it must be the id of the request that is forked"),
        ({"request_id": "a"}, {}, 20, "fork is set; the model has an encoder"),
        (
            {"request_id": "a"},
            {"resume": inference_pb2.Resume()},
            0,
            "resume and fork are both set; send these tokens as",
        ),
        ({"request_id": "a"}, {"truncate_prompt_tokens": 3}, 0, "truncate_prompt_tokens and fork are both set"),
        ({"request_id": "a", "token_ids": [0] * 99}, {}, 0, "the prompt has 100 tokens; the model's context takes at"),
    ],
)
def test_forks_that_no_parent_can_have_are_refused(
    fork: dict[str, Any], options: dict[str, Any], encoder: int, reason: str
) -> None:
    """Before the parent is looked for."""
    message = inference_pb2.GenerateRequest(request_id="b", fork=inference_pb2.Fork(**fork), **options)
    limits = replace(LIMITS, max_encoder_tokens=encoder)
    with pytest.raises(InvalidRequest, match=reason):
        RequestValidator(limits, None).check(message)


def test_a_request_id_has_a_bounded_length() -> None:
    message = inference_pb2.GenerateRequest(request_id="r" * MAX_REQUEST_ID, token_bytes=bytes(4))
    message.sampling.max_tokens = 1
    validator = RequestValidator(LIMITS, None)
    assert validator.validate(message).request_id == message.request_id
    message.request_id += "r"
    with pytest.raises(InvalidRequest, match=f"request_id has {MAX_REQUEST_ID + 1} characters"):
        validator.validate(message)


def test_a_chat_is_as_long_as_its_roles_and_contents(tmp_path: Path) -> None:
    """Found out before a template, which takes its time, sees it."""
    make_checkpoint(tmp_path)
    validator = RequestValidator(LIMITS, Tokenizer.from_folder(tmp_path))
    message = inference_pb2.GenerateRequest()
    message.chat.messages.add(role="r" * 1_000_000, content="c" * 5)
    with pytest.raises(InvalidRequest, match="chat has 1000005 characters; it may have at most"):
        validator.validate(message)
    message = inference_pb2.GenerateRequest()
    message.chat.messages.extend([inference_pb2.ChatMessage()] * (MAX_MESSAGES + 1))
    with pytest.raises(
        InvalidRequest, match=f"chat has {MAX_MESSAGES + 1} messages; it may have at most {MAX_MESSAGES}"
    ):
        validator.validate(message)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"template_kwargs": "[]"}, "template_kwargs is '\\[\\]'; it must be a JSON object"),
        ({"template_kwargs": "[" * 10_000}, "it must be a JSON object"),
        ({"template_kwargs": " " * 16_385}, "has 16385 characters; it may have at most 16384"),
        ({"template_kwargs": '{"messages": []}'}, "has messages, which is a field of its own"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "with continue_final_message it must be false",
        ),
    ],
)
def test_options_of_templates_are_checked(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    make_checkpoint(tmp_path)
    message = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(**options))
    message.chat.messages.add(role="user", content="hello")
    with pytest.raises(InvalidRequest, match=reason):
        RequestValidator(LIMITS, Tokenizer.from_folder(tmp_path)).validate(message)


def validate(prompt: int, max_tokens: int | None, open_ended: int | None = None) -> int:
    """The number of tokens that a model may make that changes its RoPE beyond 32 tokens."""
    validator = RequestValidator(ModelLimits(vocab_size=9, max_model_len=100, pool_tokens=100, rope_switch=32), None)
    message = inference_pb2.GenerateRequest()
    message.token_ids.ids.extend([1] * prompt)
    if max_tokens is not None:
        message.sampling.max_tokens = max_tokens
    return validator.validate(message, open_ended).params.max_tokens


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, 32), (30, 3), (32, 1), (33, 1), (33, 60)])
def test_a_sequence_on_one_side_of_the_switch_is_accepted(prompt: int, max_tokens: int) -> None:
    assert validate(prompt, max_tokens) == max_tokens


@pytest.mark.parametrize(("prompt", "max_tokens", "most"), [(1, 33, 32), (30, 4, 3), (32, 2, 1)])
def test_one_that_would_grow_over_it_is_refused(prompt: int, max_tokens: int, most: int) -> None:
    message = f"max_tokens is {max_tokens} after a prompt of {prompt} .*: at most {most}, or a prompt of more than 32"
    with pytest.raises(InvalidRequest, match=message):
        validate(prompt, max_tokens)


@pytest.mark.parametrize(
    ("prompt", "open_ended", "most"), [(1, 20, 20), (1, 50, 32), (30, 50, 3), (32, 50, 1), (33, 80, 67), (99, 50, 1)]
)
def test_an_open_end_takes_what_room_there_is(prompt: int, open_ended: int, most: int) -> None:
    assert validate(prompt, None, open_ended) == most
    assert validate(prompt, 1, open_ended) == 1


def test_an_open_end_makes_no_room() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 100 tokens"):
        validate(100, None, 50)


@pytest.mark.parametrize(
    ("max_tokens", "kept"),
    [
        (1, 39),
        (5, 35),
        (20, 13),
        (32, 1),
    ],  # 13 + 20 - 1 reach 32, behind which all is rotated otherwise
)
def test_as_many_tokens_as_fit_on_one_side_of_where_positions_change(max_tokens: int, kept: int) -> None:
    limits = ModelLimits(vocab_size=9, max_model_len=40, pool_tokens=100, rope_switch=32)
    message = inference_pb2.GenerateRequest(token_bytes=b"\5\0\0\0" * 5000, truncate_prompt_tokens=-1)
    message.sampling.max_tokens = max_tokens
    token_ids = RequestValidator(limits, None).validate(message).prompt.token_ids
    assert len(token_ids) == kept
    assert token_ids.base is None  # the others are not held
