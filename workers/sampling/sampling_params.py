"""How tokens are sampled and when a request ends: vLLM's names and defaults, and one validator for every frontend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tandem.workers.sampling.guided import Guided

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 0.01 * (1 - 2**-24)  # 0.01 as a float32; a tiny one would divide logits to infinity
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_GUIDED_LENGTH = 65_536  # characters
MAX_CHOICES = 1024
MAX_TAG_LENGTH = 64  # characters
MAX_BAD_WORDS = 64  # sequences of tokens; a text may be two
MAX_BAD_WORD_TOKENS = 16
MAX_ANSWERS = 128
MIN_FIRST_TOKEN_SECONDS = 0.01 * (1 - 2**-24)  # 0.01 as a float32
MAX_FIRST_TOKEN_SECONDS = 600.0
SEED_LIMIT = 1 << 64
FIRST_TOKEN_SECONDS = f"in [{MIN_FIRST_TOKEN_SECONDS:g}, {MAX_FIRST_TOKEN_SECONDS:g}]"


class InvalidSamplingParams(ValueError):
    """A parameter outside its limits; the text names field, value and limit."""


class SlidingWindow(NamedTuple):
    """The positions of output and prompt that a token sees: see inference.proto."""

    window: int
    sinks: int


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 takes all
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None  # None reports none, else the chosen token's and those of the n best
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_tokens: int = 0  # output tokens before which no stop token is sampled
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, each time
    repetition_penalty: float = 1.0  # of tokens in prompt and output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what its logit grows by), each id once
    bad_words: tuple[str, ...] = ()  # texts; the gateway makes bad_words_ids of them
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences of tokens whose last is not sampled after the others
    allowed_token_ids: tuple[int, ...] = ()  # all others are never sampled; empty allows all
    guided: Guided | None = None  # what the output has to follow
    prompt_logprobs: int | None = None  # as logprobs, of the prompt's tokens
    n: int = 1  # answers; the gateway places each as a request of one answer
    best_of: int | None = None  # answers generated, of which the n likeliest are given; None is n
    sliding: SlidingWindow | None = None  # None: each token sees all before it
    priority: int = 0  # lower numbers are served first; the gateway has its limits
    first_token_seconds: float | None = None  # from arrival at the gateway; workers get what is left, 0 or less if past

    @property
    def num_answers(self) -> int:
        """The number of sequences that are generated."""
        return self.best_of or self.n

    @property
    def changes_logits(self) -> bool:
        """Whether logits are processed before a token is sampled; see tandem.workers.sampling.logit_rules."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.bad_words_ids
            or self.allowed_token_ids
            or self.guided
        )


ROW: Mapping[str, type[np.generic]] = MappingProxyType(
    {"temperature": np.float64, "top_p": np.float64, "min_p": np.float64, "top_k": np.int64}
)
"""The parameters that samplers take for each row, and a number drawn by its seed: float64 or int64."""


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidSamplingParams on the first field that is outside its limits."""
    least = 1 if params.prompt_logprobs is None else 0
    _require(params.max_tokens >= least, "max_tokens", params.max_tokens, "at least 1, or 0 beside prompt_logprobs")
    temperature = params.temperature
    _require(0 <= temperature <= MAX_TEMPERATURE, "temperature", temperature, f"in [0, {MAX_TEMPERATURE:g}]")
    _require(0 < params.top_p <= 1, "top_p", params.top_p, "in (0, 1]")
    _require(params.top_k >= -1, "top_k", params.top_k, "at least 1, or 0 or -1 for all")
    _require(0 <= params.min_p <= 1, "min_p", params.min_p, "in [0, 1]")
    _require(params.seed is None or 0 <= params.seed < SEED_LIMIT, "seed", params.seed, "in [0, 2^64)")
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        _require(count is None or 0 <= count <= MAX_LOGPROBS, field, count, f"in [0, {MAX_LOGPROBS}]")
    _require(len(params.stop) <= MAX_STOP_STRINGS, "stop", len(params.stop), f"at most {MAX_STOP_STRINGS}", "strings")
    for text in params.stop:
        fits = 1 <= len(text) <= MAX_STOP_LENGTH
        _require(fits, "stop", len(text), f"1 to {MAX_STOP_LENGTH}", "characters in one string")
    ids = params.stop_token_ids
    _require(len(ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", len(ids), f"at most {MAX_STOP_TOKEN_IDS}", "ids")
    _require_tokens("stop_token_ids", ids, vocab_size)
    least = params.min_tokens
    _require(0 <= least <= params.max_tokens, "min_tokens", least, f"in [0, max_tokens], which is {params.max_tokens}")
    _require(1 <= params.n <= MAX_ANSWERS, "n", params.n, f"in [1, {MAX_ANSWERS}]")
    best_of, accepted = params.best_of, f"in [n, {MAX_ANSWERS}], where n is {params.n}"
    _require(best_of is None or params.n <= best_of <= MAX_ANSWERS, "best_of", best_of, accepted)
    ranked = params.num_answers > params.n
    _require(
        not ranked or params.prompt_logprobs is None, "prompt_logprobs", params.prompt_logprobs, "absent beside best_of"
    )
    target = params.first_token_seconds
    fits = target is None or target <= MAX_FIRST_TOKEN_SECONDS
    _require(fits, "first_token_seconds", target, FIRST_TOKEN_SECONDS)
    _validate_penalties(params)
    _validate_token_rules(params, vocab_size)
    if params.guided is not None:
        _validate_guided(params, params.guided)
    if params.sliding is not None:
        window, sinks = params.sliding
        _require(window >= 1, "sliding.window", window, "at least 1")
        _require(0 <= sinks < window, "sliding.sinks", sinks, f"in [0, {window}), less than the window")


def _validate_penalties(params: SamplingParams) -> None:
    for field in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, field)
        _require(-MAX_PENALTY <= value <= MAX_PENALTY, field, value, f"in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    repetition = params.repetition_penalty
    fits = MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY
    accepted = f"in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
    _require(fits, "repetition_penalty", repetition, accepted)


def _validate_token_rules(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    _require(len(bias) <= MAX_BIASED_TOKENS, "logit_bias", len(bias), f"at most {MAX_BIASED_TOKENS}", "tokens")
    _require_tokens("logit_bias", [token for token, _ in bias], vocab_size)
    for token, value in bias:
        fits = -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS
        _require(fits, f"logit_bias[{token}]", value, f"in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")
    for text in params.bad_words:
        fits = 1 <= len(text) <= MAX_STOP_LENGTH
        _require(fits, "bad_words", len(text), f"1 to {MAX_STOP_LENGTH}", "characters in one text")
    words = params.bad_words_ids
    num_words = len(words) + len(params.bad_words)
    _require(num_words <= MAX_BAD_WORDS, "bad_words", num_words, f"at most {MAX_BAD_WORDS}", "words")
    for word in words:
        fits = 1 <= len(word) <= MAX_BAD_WORD_TOKENS
        _require(fits, "bad_words_ids", len(word), f"1 to {MAX_BAD_WORD_TOKENS}", "tokens in one word")
        _require_tokens("bad_words_ids", word, vocab_size)
    allowed = params.allowed_token_ids
    _require(len(allowed) <= vocab_size, "allowed_token_ids", len(allowed), f"at most {vocab_size}", "ids")
    _require_tokens("allowed_token_ids", allowed, vocab_size)


def _validate_guided(params: SamplingParams, guided: Guided) -> None:
    """Checks a guide. Other masks with it could leave no token at all."""
    texts, size = guided.texts, sum(map(len, guided.texts))
    _require(1 <= len(texts) <= MAX_CHOICES, "guided.choice", len(texts), f"1 to {MAX_CHOICES}", "texts")
    _require(size <= MAX_GUIDED_LENGTH, f"guided.{guided.kind}", size, f"at most {MAX_GUIDED_LENGTH}", "characters")
    for text in texts:
        _require(bool(text), f"guided.{guided.kind}", 0, "at least 1", "characters")
    if guided.thinking is not None:
        for field in ("begin", "end"):
            size = len(getattr(guided.thinking, field))
            fits = 1 <= size <= MAX_TAG_LENGTH
            _require(fits, f"guided.thinking.{field}", size, f"1 to {MAX_TAG_LENGTH}", "characters")
    for field in ("min_tokens", "bad_words", "bad_words_ids", "allowed_token_ids", "ignore_eos"):
        value = getattr(params, field)
        given = value if isinstance(value, int) else len(value)
        _require(not value, field, given, "absent beside guided")


def _require_tokens(field: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        _require(0 <= token < vocab_size, field, token, f"inside the vocabulary, [0, {vocab_size})")


def _require(holds: bool, field: str, value: float | None, accepted: str, unit: str = "") -> None:
    """Refuses a field unless `holds`. NaN fails every comparison, so it is refused, too."""
    if not holds:
        received = f"has {value} {unit}" if unit else f"is {value}"
        raise InvalidSamplingParams(f"{field} {received}; it must be {accepted}")
