"""Turns sampled tokens into the text that one client sees."""

from typing import NamedTuple

from tandem.cluster.text.stop_strings import StopStringMatcher
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams


class OutputPart(NamedTuple):
    """Output of some tokens. num_tokens of the given tokens belong to it: fewer than given if a stop string ended the
    output."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    stop: str | None = None  # the stop string that ended it


class TextOutput:
    """Detokenises one request's tokens in order, and watches for its stop strings after the first min_tokens.

    Without a tokenizer the text stays empty, and stop strings were refused when the request was validated.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._text = None if tokenizer is None else tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStringMatcher(params.stop, include=params.include_stop_str_in_output)
        self._watches = len(params.stop) > 0
        self._least = params.min_tokens  # as in vLLM, no stop string ends in the first tokens' text
        self._count = 0
        self._show_stop_token = params.include_stop_str_in_output

    def add(self, token_ids: list[int], finish_reason: FinishReason) -> OutputPart:
        """Adds tokens. finish_reason is the workers' reason after the last of token_ids; a stop string overrides it."""
        if self._text is None:
            return OutputPart("", len(token_ids), finish_reason)
        if not self._watches and finish_reason == FinishReason.RUNNING:  # as most are
            return OutputPart(self._text.push(token_ids), len(token_ids), finish_reason)
        shown = token_ids
        if finish_reason == FinishReason.STOP and not self._show_stop_token:
            shown = token_ids[:-1]  # the stop token itself is no text
        text, count = "", 0
        # Token by token only where a stop string may fall between two of them: each push decodes twice.
        for piece in ([token_id] for token_id in shown) if self._watches else [shown]:
            count += len(piece)
            self._count += len(piece)
            text += self._stops.push(self._text.push(piece), ends=self._count > self._least)
            if self._stops.matched is not None:
                return OutputPart(text, count, FinishReason.STOP, self._stops.matched)
        if finish_reason != FinishReason.RUNNING:
            text += self._stops.push(self._text.flush(), ends=self._count > self._least)
            if self._stops.matched is not None:
                finish_reason = FinishReason.STOP
            text += self._stops.flush()
        return OutputPart(text, len(token_ids), finish_reason, self._stops.matched)
