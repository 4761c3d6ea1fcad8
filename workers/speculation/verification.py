"""A verify step: it samples the target's token after each drafted one, and accepts drafts as long as they are equal."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.scheduling.step_time import NOTHING, StepLoad


class Verifier(Protocol):
    """The launcher of verify steps: see Speculation."""

    def recall(self, step: "Verification", /) -> None: ...

    def settle(self, step: "Verification", runs: Sequence[TokenRun], /) -> None: ...


@dataclass(eq=False)
class Verification:
    """A launched verify step of n requests. Its input is each request's last token and draft, which may be empty.

    There is a sample after each input token, so each request has one more sample than drafted tokens.
    """

    requests: list[DecodeRequest]
    sizes: list[int]  # drafted tokens of each request
    drafts: Sequence[Int64Array] | None  # None while only the device has them; see Speculation.recall
    pending: PendingSamples
    drafting: PendingSamples | None = None  # samples of a draft model or head, see Drafts.draft_behind
    found: Sequence[int] = ()  # tokens of each draft that the look-up found
    load: StepLoad = NOTHING  # see StepInFlight
    released: list[int] = field(default_factory=list)  # see StepInFlight
    verifier: Verifier = field(kw_only=True, repr=False)
    rows: DecodeRows = field(kw_only=True, repr=False)
    verifies: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        """The input tokens of the step."""
        return sum(self.sizes) + len(self.sizes)

    def settle(self, samples: Samples, runs: Sequence[TokenRun], *, is_last: bool) -> None:
        """Takes rejected tokens back. The rows continue after the accepted ones."""
        self.verifier.settle(self, runs)
        self.rows.verified(self.requests, runs)

    def runs(self, samples: Samples) -> list[TokenRun]:
        """The new tokens of each request: the target's samples up to and including the first one that differs from its
        draft."""
        if self.drafts is None:
            self.verifier.recall(self)
        assert self.drafts is not None
        ends = np.cumsum(self.sizes) + np.arange(1, len(self.sizes) + 1)
        wrong = np.ones(samples.token_ids.size, np.bool_)  # the last sample of each request has no draft
        drafted = wrong.copy()
        drafted[ends - 1] = False
        wrong[drafted] = samples.token_ids[drafted] != np.concatenate(self.drafts)
        (places,) = wrong.nonzero()
        begins = np.concatenate(([0], ends[:-1]))
        lasts = places[np.searchsorted(places, begins)]
        tokens = samples.token_ids.tolist()
        return [
            _finished(request, tokens[begin : last + 1], samples.logprobs[begin : last + 1])
            for request, begin, last in zip(self.requests, begins.tolist(), lasts.tolist(), strict=True)
        ]


def _finished(request: DecodeRequest, tokens: list[int], logprobs: Sequence) -> TokenRun:
    """Returns the tokens up to the first one that ends the request."""
    assert request.rule is not None
    rule, before = request.rule, len(request.output)
    if before + len(tokens) < rule.max_tokens and rule.stop_ids.isdisjoint(tokens) and NOT_FINITE not in tokens:
        return TokenRun(tokens, logprobs, FinishReason.RUNNING)
    reason, count = FinishReason.RUNNING, 0
    for count, token in enumerate(tokens, start=1):
        reason = FinishReason.ERROR if token == NOT_FINITE else rule.reason(token, before + count)
        if reason != FinishReason.RUNNING:
            break
    return TokenRun(tokens[:count], logprobs[:count], reason)
