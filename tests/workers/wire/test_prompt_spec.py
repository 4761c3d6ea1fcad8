"""A prompt as one value: what the next placement of its request computes, and its messages."""

from dataclasses import fields, replace

import numpy as np

from tandem.proto import worker_pb2
from tandem.workers.sampling.sampling_params import SlidingWindow
from tandem.workers.service.call_checks import PromptCheck
from tandem.workers.wire.messages import prompt_to_proto
from tandem.workers.wire.prompt_spec import EncoderPrompt, PromptSpec

PROMPT = PromptSpec(np.array([5, 6, 0, 0, 7]), b"salt", EncoderPrompt(2, 4), SlidingWindow(6, 1))


def test_output_becomes_prompt_and_all_else_stays() -> None:
    later = PROMPT.going_on([8, 9], whole=True)
    assert later.token_ids.tolist() == [5, 6, 0, 0, 7, 8, 9]
    assert (later.num_output, later.whole) == (2, True)
    changed = {"token_ids", "num_output", "whole"}
    for field in fields(PromptSpec):
        assert field.name in changed or getattr(later, field.name) == getattr(PROMPT, field.name)
    assert (len(PROMPT), PROMPT.num_output) == (5, 0)


def test_padding_is_nobodys_token() -> None:
    assert PROMPT.unpadded.tolist() == [5, 6, 7]
    assert (PROMPT.num_decoder, PROMPT.encoder.padding) == (1, 2)


def test_a_window_is_fitted_with_prompt_and_output() -> None:
    assert [PROMPT.fits_window(count) for count in (1, 2)] == [True, False]
    assert PromptSpec(PROMPT.token_ids).fits_window(1 << 40)


def test_a_message_says_all_of_a_prompt() -> None:
    prompt = replace(PROMPT, sliding=SlidingWindow(24, 4), whole=True, num_output=2)
    check = PromptCheck(vocab_size=10, max_model_len=100, most_encoder=64, page_size=prompt.encoder.border)
    read = check(worker_pb2.AnnounceRequest(prompt=prompt_to_proto(prompt)))
    for field in fields(PromptSpec):
        assert np.array_equal(getattr(read, field.name), getattr(prompt, field.name)), field.name
