"""The two prompts of a request to a model with an encoder."""

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.text.tokenizer import Tokenizer, TokenizerFailed
from tandem.proto import inference_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.wire.messages import prompt_from_bytes


class InvalidHalf(ValueError):
    """One of the two prompts is invalid; the text names its field."""


def take_encoder_prompt(message: inference_pb2.GenerateRequest, *, has_encoder: bool) -> None:
    """Moves encoder_prompt into the message's input. InvalidHalf if the message has both, or has one of these prompts
    for a model without an encoder. Idempotent."""
    for name in ("encoder_prompt", "decoder_prompt"):
        if message.HasField(name) and not has_encoder:
            raise InvalidHalf(f"{name} is set; this model has no encoder: send one prompt alone")
    if not message.HasField("encoder_prompt"):
        return
    kind = message.WhichOneof("input")
    if kind is not None:
        raise InvalidHalf(f"encoder_prompt and {kind} are both set; set only one")
    given = message.encoder_prompt.WhichOneof("input")
    if given is None:
        raise InvalidHalf("encoder_prompt is empty; set its text, token_ids or token_bytes")
    if given == "token_ids":
        message.token_ids.CopyFrom(message.encoder_prompt.token_ids)
    else:
        setattr(message, given, getattr(message.encoder_prompt, given))
    message.ClearField("encoder_prompt")


def decoder_prompt(message: inference_pb2.GenerateRequest, tokenizer: Tokenizer | None, start: int) -> Int64Array:
    """Returns the ids that the decoder begins with, int64 [n]: `start` and then decoder_prompt, or decoder_prompt alone
    if it begins with `start`. Its text gets no special tokens. Raises InvalidHalf."""
    prompt = message.decoder_prompt
    kind, ids = prompt.WhichOneof("input"), np.empty(0, np.int64)
    if kind == "token_ids":
        ids = np.array(prompt.token_ids.ids[:], np.int64)
    elif kind == "token_bytes":
        try:
            ids = prompt_from_bytes(prompt.token_bytes, "decoder_prompt.token_bytes")
        except InvalidCall as error:
            raise InvalidHalf(str(error)) from error
    elif kind == "text":
        if tokenizer is None:
            raise InvalidHalf("decoder_prompt.text: the checkpoint has no tokenizer.json; send token_ids")
        try:
            ids = np.array(tokenizer.encode(prompt.text, add_special_tokens=False), np.int64)
        except TokenizerFailed as error:
            raise InvalidHalf(f"decoder_prompt.text: {error}") from error
    return ids if ids.size and ids[0] == start else np.concatenate(([start], ids))
