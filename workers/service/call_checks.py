"""Checks of every call to a worker, before a loop sees it: one bad call must not fail a forward of many requests."""

from typing import NamedTuple

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.prefix_chain import MAX_SALT_BYTES
from tandem.cache.plan.spans import Paging
from tandem.proto import inference_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.sampling.sampling_params import InvalidSamplingParams, SamplingParams, validate
from tandem.workers.wire.messages import prompt_from_bytes, sampling_from_proto

MAX_REQUEST_ID = 256  # characters: a client's own, and what the gateway puts before it


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidCall(f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID} are accepted")


def check_prompt(
    request_id: str, prompt: bytes, max_tokens: int, *, vocab_size: int, max_model_len: int, slides: bool = False
) -> Int64Array:
    """The token ids of a request's prompt as messages carry it, int64 [n].

    max_tokens: output tokens, of which the last is never fed back. slides: they may be any number.
    """
    check_request_id(request_id)
    token_ids = prompt_from_bytes(prompt)
    largest = int(token_ids.max())
    if largest >= vocab_size:
        raise InvalidCall(f"prompt has token {largest}; the vocabulary has {vocab_size} entries, 0 … {vocab_size - 1}")
    if max_tokens < 1:
        raise InvalidCall(f"max_tokens is {max_tokens}; it must be at least 1")
    if token_ids.size + (1 if slides else max_tokens) - 1 > max_model_len:
        raise InvalidCall(
            f"prompt has {token_ids.size} tokens and max_tokens is {max_tokens}; this worker has {max_model_len} "
            "positions for a sequence"
        )
    return token_ids


class EncoderCheck(NamedTuple):
    """most: tokens of an encoder's prompt; 0: the model has no encoder."""

    most: int
    page_size: int

    def __call__(self, encoder_tokens: int, prompt: Int64Array) -> int:
        """encoder_tokens, so many of which, padded to whole pages, the prompt begins with; InvalidCall if it cannot."""
        least = 1 if self.most else 0
        if not least <= encoder_tokens <= self.most:
            raise InvalidCall(f"encoder_tokens is {encoder_tokens}; {least} … {self.most} are accepted")
        border = Paging(1, self.page_size).whole(encoder_tokens)
        if prompt.size <= border:
            raise InvalidCall(
                f"prompt has {prompt.size} tokens; the encoder's take up {border}, and at least one must follow"
            )
        return encoder_tokens


def check_salt(salt: bytes) -> bytes:
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidCall(f"salt has {len(salt)} bytes; at most {MAX_SALT_BYTES} are accepted")
    return salt


def check_sampling(message: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    params = sampling_from_proto(message)
    try:
        validate(params, vocab_size)
    except InvalidSamplingParams as error:
        raise InvalidCall(f"sampling.{error}") from error
    if params.temperature > 0 and params.seed is None:
        raise InvalidCall("sampling.seed is missing; where temperature is above 0 the gateway draws it")
    return params


def check_num_output(num_output: int, prompt_tokens: int) -> int:
    if num_output >= prompt_tokens:
        raise InvalidCall(f"num_output is {num_output}; the prompt of {prompt_tokens} tokens must be longer")
    return num_output
