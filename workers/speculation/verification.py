"""A verify step: the target's own tokens behind each drafted one, which are accepted while they agree."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.posted_samples import NOT_FINITE


@dataclass(frozen=True, eq=False)
class Verification:
    """A verify step that was launched: n requests, each with its last token and its draft, perhaps an empty one.

    The samples have a token behind each of these: one more than drafted, per request.
    """

    requests: list[DecodeRequest]
    drafts: Sequence[Int64Array]
    pending: PendingSamples
    prompt_tokens: int = 0  # see StepInFlight
    released: list[int] = field(default_factory=list)  # see StepInFlight

    def runs(self, samples: Samples) -> list[TokenRun]:
        """The tokens that count, of each request: those that the target samples, as long as it was asked with what it
        had sampled before."""
        runs, begin = [], 0
        for request, draft in zip(self.requests, self.drafts, strict=True):
            sampled = samples.token_ids[begin : begin + draft.size + 1]
            logprobs = samples.logprobs[begin : begin + draft.size + 1]
            begin += draft.size + 1
            runs.append(_finished(request, sampled[: num_accepted(draft, sampled) + 1].tolist(), logprobs))
        return runs


def num_accepted(draft: Int64Array, sampled: Int64Array) -> int:
    """How many tokens of draft (int64 [k]) are those that were sampled in their places (int64 [k + 1])."""
    wrong = np.flatnonzero(draft != sampled[:-1])
    return int(wrong[0]) if wrong.size else draft.size


def _finished(request: DecodeRequest, tokens: list[int], logprobs: Sequence) -> TokenRun:
    """Up to the first token that ends the request."""
    assert request.rule is not None
    reason, count = FinishReason.RUNNING, 0
    for count, token in enumerate(tokens, start=1):
        reason = request.rule.reason(token, len(request.output) + count)
        if token == NOT_FINITE:
            reason = FinishReason.ERROR
        if reason != FinishReason.RUNNING:
            break
    return TokenRun(tokens[:count], logprobs[:count], reason)
