"""How tokens are sampled and when a request ends: vLLM's names and defaults, and one validator for every frontend."""

from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
SEED_LIMIT = 1 << 64


class InvalidSamplingParams(ValueError):
    """A parameter outside its limits; the text names field, value and limit."""


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


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidSamplingParams on the first field that is outside its limits."""
    _require(params.max_tokens >= 1, "max_tokens", params.max_tokens, "at least 1")
    temperature = params.temperature
    _require(0 <= temperature <= MAX_TEMPERATURE, "temperature", temperature, f"in [0, {MAX_TEMPERATURE:g}]")
    _require(0 < params.top_p <= 1, "top_p", params.top_p, "in (0, 1]")
    _require(params.top_k >= -1, "top_k", params.top_k, "at least 1, or 0 or -1 for all")
    _require(0 <= params.min_p <= 1, "min_p", params.min_p, "in [0, 1]")
    _require(params.seed is None or 0 <= params.seed < SEED_LIMIT, "seed", params.seed, "in [0, 2^64)")
    logprobs = params.logprobs
    _require(logprobs is None or 0 <= logprobs <= MAX_LOGPROBS, "logprobs", logprobs, f"in [0, {MAX_LOGPROBS}]")
    _require(len(params.stop) <= MAX_STOP_STRINGS, "stop", len(params.stop), f"at most {MAX_STOP_STRINGS}", "strings")
    for text in params.stop:
        fits = 1 <= len(text) <= MAX_STOP_LENGTH
        _require(fits, "stop", len(text), f"1 to {MAX_STOP_LENGTH}", "characters in one string")
    ids = params.stop_token_ids
    _require(len(ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", len(ids), f"at most {MAX_STOP_TOKEN_IDS}", "ids")
    for token in ids:
        _require(0 <= token < vocab_size, "stop_token_ids", token, f"inside the vocabulary, [0, {vocab_size})")


def _require(holds: bool, field: str, value: float | None, accepted: str, unit: str = "") -> None:
    """NaN fails every comparison, so it is refused too."""
    if not holds:
        received = f"has {value} {unit}" if unit else f"is {value}"
        raise InvalidSamplingParams(f"{field} {received}; it must be {accepted}")
