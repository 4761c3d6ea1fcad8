import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.workers.sampling.sampling_params import InvalidSamplingParams, SamplingParams, validate

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 100.0, "top_p": 1.0, "top_k": -1, "min_p": 1.0, "seed": 2**64 - 1, "logprobs": 0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0, "min_tokens": 16},
    {"repetition_penalty": float(np.float32(0.01))},
    {"logit_bias": ((0, -100.0), (99, 100.0)), "bad_words": ("x" * 256,) * 63, "bad_words_ids": ((99,) * 16,)},
    {"allowed_token_ids": tuple(range(100))},
    {"max_tokens": 0, "prompt_logprobs": 20},
    {"stop": ("x" * 256,) * 16, "stop_token_ids": (0, 99) * 32, "logprobs": 20},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1, or 0 beside prompt_logprobs"),
    ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens is -1; it must be at least 1, or 0 beside prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be in [0, 20]"),
    ({"prompt_logprobs": 1, "best_of": 2}, "prompt_logprobs is 1; it must be absent beside best_of"),
    ({"temperature": -0.1}, "temperature is -0.1; it must be in [0, 100]"),
    ({"temperature": math.inf}, "temperature is inf; it must be in [0, 100]"),
    ({"temperature": math.nan}, "temperature is nan; it must be in [0, 100]"),
    ({"top_p": 0.0}, "top_p is 0.0; it must be in (0, 1]"),
    ({"top_p": math.nan}, "top_p is nan; it must be in (0, 1]"),
    ({"top_k": -2}, "top_k is -2; it must be at least 1, or 0 or -1 for all"),
    ({"min_p": 1.5}, "min_p is 1.5; it must be in [0, 1]"),
    ({"seed": -1}, "seed is -1; it must be in [0, 2^64)"),
    ({"seed": 2**64}, f"seed is {2**64}; it must be in [0, 2^64)"),
    ({"logprobs": 21}, "logprobs is 21; it must be in [0, 20]"),
    ({"stop": ("a",) * 17}, "stop has 17 strings; it must be at most 16"),
    ({"stop": ("",)}, "stop has 0 characters in one string; it must be 1 to 256"),
    ({"stop": ("x" * 257,)}, "stop has 257 characters in one string; it must be 1 to 256"),
    ({"min_tokens": 17}, "min_tokens is 17; it must be in [0, max_tokens], which is 16"),
    ({"presence_penalty": math.nan}, "presence_penalty is nan; it must be in [-2, 2]"),
    ({"frequency_penalty": 2.1}, "frequency_penalty is 2.1; it must be in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be in [0.01, 100]"),
    ({"repetition_penalty": 1.4e-45}, "repetition_penalty is 1.4e-45; it must be in [0.01, 100]"),
    ({"logit_bias": ((1, math.inf),)}, "logit_bias[1] is inf; it must be in [-100, 100]"),
    ({"logit_bias": ((100, 1.0),)}, "logit_bias is 100; it must be inside the vocabulary, [0, 100)"),
    ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias has 1025 tokens; it must be at most 1024"),
    ({"bad_words_ids": ((1,),) * 65}, "bad_words has 65 words; it must be at most 64"),
    ({"bad_words_ids": ((1,) * 17,)}, "bad_words_ids has 17 tokens in one word; it must be 1 to 16"),
    ({"allowed_token_ids": (5, -1)}, "allowed_token_ids is -1; it must be inside the vocabulary, [0, 100)"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 ids; it must be at most 64"),
    ({"stop_token_ids": (100,)}, "stop_token_ids is 100; it must be inside the vocabulary, [0, 100)"),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_accepted(fields: dict[str, Any]) -> None:
    validate(replace(SamplingParams(), **fields), vocab_size=100)


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_refused_with_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSamplingParams) as caught:
        validate(replace(SamplingParams(), **fields), vocab_size=100)
    assert str(caught.value) == message
