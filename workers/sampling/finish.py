"""Ends a sequence, as far as token ids can tell. Stop strings are text and are matched at the gateway."""

from dataclasses import dataclass
from enum import IntEnum

from tandem.workers.sampling.sampling_params import SamplingParams


class FinishReason(IntEnum):
    """Numbers as in inference.proto."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True)
class FinishRule:
    """Ends a sequence at a stop token or after max_tokens; both sides of a transfer and the gateway share it."""

    stop_ids: frozenset[int]
    max_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> "FinishRule":
        eos = () if params.ignore_eos else eos_token_ids
        return cls(frozenset(params.stop_token_ids) | frozenset(eos), params.max_tokens)

    def reason(self, token_id: int, num_output: int) -> FinishReason:
        """The state after `token_id` as the num_output-th output token (counted from 1)."""
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output >= self.max_tokens else FinishReason.RUNNING
