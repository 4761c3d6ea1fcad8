"""Checks of every call to a worker, before a loop sees it: one bad call must not fail a forward of many requests."""

from typing import NamedTuple

from tandem.cache.plan.prefix_chain import DIGEST_BYTES, MAX_SALT_BYTES, adapter_salt
from tandem.cache.plan.spans import Paging
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.sampling.sampling_params import InvalidSamplingParams, SamplingParams, validate
from tandem.workers.wire.messages import prompt_from_bytes, sampling_from_proto, sliding_from_proto
from tandem.workers.wire.prompt_spec import EncoderPrompt, PromptSpec

PromptRequest = worker_pb2.PrepareReceiveRequest | worker_pb2.AnnounceRequest | worker_pb2.RemoteSendRequest

MAX_REQUEST_ID = 256  # characters: a client's own, and what the gateway puts before it


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidCall(f"request_id has {len(request_id)} characters; it may have at most {MAX_REQUEST_ID}")


def check_digest(digest: bytes, field: str = "adapter") -> None:
    """Raises InvalidCall unless it is an adapter's digest."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidCall(f"{field} has {len(digest)} bytes; it must have {DIGEST_BYTES}, or none")


def check_salt(salt: bytes, adapter: bytes) -> bytes:
    """The salt of a prompt that the adapter computes. Raises InvalidCall."""
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidCall(f"salt has {len(salt)} bytes; it may have at most {MAX_SALT_BYTES}")
    if adapter:
        check_digest(adapter)
    return adapter_salt(adapter, salt)


class PromptCheck(NamedTuple):
    """Makes prompts of messages. Raises InvalidCall for one that this worker cannot compute."""

    vocab_size: int
    max_model_len: int
    most_encoder: int  # tokens of an encoder's prompt; 0: the model has no encoder
    page_size: int

    def __call__(self, request: PromptRequest, max_tokens: int = 1) -> PromptSpec:
        """See of()."""
        check_request_id(request.request_id)
        return self.of(request.prompt, max_tokens)

    def of(self, message: worker_pb2.PromptSpec, max_tokens: int = 1) -> PromptSpec:
        """max_tokens: output tokens; the last is never fed back. A sliding sequence may have any number."""
        token_ids = prompt_from_bytes(message.token_ids)
        encoder = self._encoder(message.encoder_tokens)
        sliding = sliding_from_proto(message.sliding) if message.HasField("sliding") else None
        salt, adapter = check_salt(message.salt, message.adapter), message.adapter
        prompt = PromptSpec(
            token_ids, salt, encoder, sliding, message.whole, message.num_output, message.priority, adapter
        )
        largest = int(token_ids.max())
        if largest >= self.vocab_size:
            accepted = f"{self.vocab_size} entries, 0 … {self.vocab_size - 1}"
            raise InvalidCall(f"prompt has token {largest}; the vocabulary has {accepted}")
        if max_tokens < 1:
            raise InvalidCall(f"max_tokens is {max_tokens}; it must be at least 1")
        if len(prompt) + (max_tokens if prompt.sliding is None else 1) - 1 > self.max_model_len:
            raise InvalidCall(
                f"prompt has {len(prompt)} tokens and max_tokens is {max_tokens}; this worker has {self.max_model_len} "
                "positions for a sequence"
            )
        if prompt.num_decoder < 1:
            raise InvalidCall(
                f"prompt has {len(prompt)} tokens; the encoder's take up {encoder.border}, and at least one must follow"
            )
        if prompt.num_output >= len(prompt):
            reason = f"the prompt of {len(prompt)} tokens must be longer"
            raise InvalidCall(f"num_output is {prompt.num_output}; {reason}")
        return prompt

    def _encoder(self, tokens: int) -> EncoderPrompt:
        least = 1 if self.most_encoder else 0
        if not least <= tokens <= self.most_encoder:
            raise InvalidCall(f"encoder_tokens is {tokens}; it must be from {least} to {self.most_encoder}")
        return EncoderPrompt(tokens, Paging(1, self.page_size).padded(tokens))


def check_sampling(message: inference_pb2.SamplingParams, vocab_size: int) -> SamplingParams:
    params = sampling_from_proto(message)
    try:
        validate(params, vocab_size)
    except InvalidSamplingParams as error:
        raise InvalidCall(f"sampling.{error}") from error
    if params.temperature > 0 and params.seed is None:
        raise InvalidCall("sampling.seed is missing; where temperature is above 0 the gateway draws it")
    return params
