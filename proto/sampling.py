"""SamplingParams of inference.proto as type checkers see them in Python. proto/generate.py makes this file."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Sampling(TypedDict, total=False):
    """Sampling parameters by vLLM's names."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    min_tokens: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str]
    bad_words_ids: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    guided: Mapping[str, Any]
    prompt_logprobs: int
    n: int
    best_of: int
    sliding: Mapping[str, int]
    first_token_seconds: float
    priority: int
