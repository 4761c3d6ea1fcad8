"""Token ids of what a request says: text, chat messages, or ids."""

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2


def prompt_tokens(tokenizer: Tokenizer | None, message: inference_pb2.GenerateRequest) -> Int64Array:
    """int64 [n] of `text`, `chat` or `token_ids`. The first two need a tokenizer.

    Raises ChatTemplateError and TokenizerFailed.
    """
    if message.HasField("token_ids"):
        # A slice is a list: numpy takes thrice as long for what protobuf has.
        return np.array(message.token_ids.ids[:], np.int64)
    assert tokenizer is not None, "the validator refuses text without one"
    if message.HasField("text"):
        return np.array(tokenizer.encode(message.text), np.int64)
    messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
    return np.array(tokenizer.encode_chat(messages), np.int64)
