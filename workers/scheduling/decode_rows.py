"""The sequences that are decoded together, as arrays: planning a step costs no Python loop over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.finish import FinishReason, FinishRule
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.scheduling.batch import DecodeStep
from tandem.workers.scheduling.step_time import NOTHING, StepLoad

REASONS = tuple(FinishReason)  # by their numbers; an enum looks each one up


@dataclass(frozen=True, eq=False)
class StepInFlight:
    """A decode step that was launched, of n rows."""

    requests: list[DecodeRequest]
    limits: Int64Array  # [n], LENGTH for rows that get their last possible token, else RUNNING
    stop_ids: Int64Array  # [n, k]
    pending: PendingSamples
    rows: "DecodeRows"  # which launched it
    load: StepLoad  # what the device computes between the step before and this one
    released: list[int] = field(default_factory=list)  # sequences that ended since; the step may write to their pages
    verifies: ClassVar[bool] = False

    def settle(self, samples: Samples, runs: Sequence[TokenRun], *, is_last: bool) -> None:
        """The next step takes its tokens from the host, unless it is launched."""
        if is_last:
            self.rows.learn(samples.token_ids)

    def runs(self, samples: Samples) -> list[TokenRun]:
        """Returns the token of each row."""
        reasons = self.reasons(samples.token_ids).tolist()
        return [
            TokenRun((token,), (logprob,), REASONS[reason])
            for token, logprob, reason in zip(samples.token_ids.tolist(), samples.logprobs, reasons, strict=True)
        ]

    def reasons(self, sampled: Int64Array) -> Int64Array:
        """The FinishReason of each row once it got the token that was sampled for it; both int64 [n]."""
        stops = self.stop_ids == sampled[:, None]
        if not np.count_nonzero(stops):  # a third of any()
            return self.limits
        reasons = np.where(stops.any(axis=1), int(FinishReason.STOP), self.limits)
        return np.where(sampled == NOT_FINITE, int(FinishReason.ERROR), reasons)


class DecodeRows:
    """The rows of the next step, one a request. What a launch changes is known without the tokens that it samples.

    All arrays are int64 [n]; they are replaced and never written to, so that steps may keep them.
    tokens, sources: see DecodeStep.
    lengths: positions whose KV is stored once the steps launched so far are done.
    ends: the length with which a request has all tokens that it may have.
    drafted: tokens that the last launched step verified for them.
    last_level: the highest level of a request; 0 without rows.
    stop_ids: [n, k], rows filled up with at least one NOT_FINITE, which ends a request, too.
    """

    def __init__(self) -> None:
        self.tokens, self.lengths, self.ends = np.zeros((3, 0), np.int64)
        self.sources = np.zeros(0, np.int64)
        self.stop_ids = np.zeros((0, 0), np.int64)
        self.drafted = 0
        self.sampling = SampleBatch.from_params([])
        self._set_requests([])

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def positions(self) -> int:
        """The positions of all rows, whose KV the next step reads."""
        return int(self.lengths.sum())

    def has_priority(self, most: int) -> bool:
        """Returns whether a row has a priority of at most this number."""
        return self._first_priority <= most

    @property
    def steps_left(self) -> int:
        """Plain steps until a row has all tokens that it may have; 0 without rows."""
        return self._steps_left

    def join(self, requests: Sequence[DecodeRequest]) -> None:
        """Adds requests whose prompt is stored and whose last output token is on the host."""
        if not requests:
            return
        rules = [request.rule for request in requests if request.rule is not None]
        before = np.array([len(request.prompt) - 1 for request in requests], np.int64)  # the first output
        self._append("tokens", np.array([request.output[-1] for request in requests], np.int64))
        self._append("sources", np.full(len(requests), ON_HOST, np.int64))
        self._append("lengths", before + np.array([len(request.output) for request in requests], np.int64))
        self._append("ends", before + np.array([rule.max_tokens for rule in rules], np.int64))
        self.stop_ids = _stack(self.stop_ids, rules)
        params = [request.params for request in requests if request.params is not None]
        rules = [request.logit_rules for request in requests]
        self.sampling = self.sampling.join(SampleBatch.from_params(params, rules))
        self._set_requests([*self.requests, *requests])

    def leave(self, requests: Sequence[DecodeRequest]) -> None:
        """Removes the rows of requests. Requests without a row are skipped."""
        gone = set(map(id, requests))
        self._keep(np.array([id(request) not in gone for request in self.requests], np.bool_))

    def next_step(self) -> DecodeStep | None:
        """Returns a step of all rows; None without rows."""
        if not self.requests:
            return None
        return DecodeStep(self.sequence_ids, self.tokens, self.sources, self.sampling, self.lengths + 1)

    def launched(self, step: DecodeStep, pending: PendingSamples, load: StepLoad = NOTHING) -> StepInFlight:
        """`step`, which next_step() gave since the last change, was launched. Rows with their last token leave. load:
        see StepInFlight."""
        self.lengths = step.positions
        self.sources = self._every_row
        self._steps_left -= 1
        if self._steps_left > 0:
            return StepInFlight(self.requests, self._no_limits, self.stop_ids, pending, self, load)
        last = self.lengths >= self.ends
        limits = np.where(last, int(FinishReason.LENGTH), int(FinishReason.RUNNING))
        in_flight = StepInFlight(self.requests, limits, self.stop_ids, pending, self, load)
        self._keep(~last)
        return in_flight

    def learn(self, sampled: Int64Array) -> None:
        """The last launched step has sampled these tokens, int64 [m], one for each row that it had."""
        self.tokens = np.where(self.sources == ON_HOST, self.tokens, sampled[self.sources])
        self.sources = self._on_host

    def verified(self, requests: Sequence[DecodeRequest], runs: Sequence[TokenRun]) -> None:
        """A verify step has given requests[i] the tokens runs[i], which are on the host. Rows that end with them are
        still there. Some may have left since it was launched, and others, whose tokens are known, have joined."""
        grown = dict(zip(map(id, requests), (run.token_ids for run in runs), strict=True))
        tokens = [grown.get(id(request), ()) for request in self.requests]
        lasts = zip(tokens, self.tokens.tolist(), strict=True)
        self.tokens = np.array([run[-1] if run else before for run, before in lasts], np.int64)
        self.sources = self._on_host
        self.lengths = self.lengths + np.array([len(run) for run in tokens], np.int64)
        self._count_steps()

    def _append(self, name: str, values: Int64Array) -> None:
        setattr(self, name, np.concatenate((getattr(self, name), values)))

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        if kept.all():
            return
        rows = np.flatnonzero(kept)
        for name in ("tokens", "sources", "lengths", "ends", "stop_ids"):
            setattr(self, name, getattr(self, name)[rows])
        self.sampling = self.sampling.take(rows)
        self._set_requests([self.requests[row] for row in rows.tolist()])

    def _count_steps(self) -> None:
        self._steps_left = int((self.ends - self.lengths).min()) if self.requests else 0

    def _set_requests(self, requests: list[DecodeRequest]) -> None:
        """Makes these requests the rows of the arrays."""
        self.requests = requests
        self.sequence_ids = tuple(request.sequence_id for request in requests)
        self._first_priority = min((request.prompt.priority for request in requests), default=0)
        self.last_level = max((request.level for request in requests), default=0)
        # Steps without a request that has all the tokens that it may have, and what they use again each time.
        self._count_steps()
        self._every_row = np.arange(len(requests))
        self._on_host = np.full(len(requests), ON_HOST)
        self._no_limits = np.full(len(requests), int(FinishReason.RUNNING))


def _stack(stop_ids: Int64Array, rules: Sequence[FinishRule]) -> Int64Array:
    """Stacks stop_ids and a row for each rule."""
    rows = stop_ids.shape[0]
    width = max([stop_ids.shape[1], *(len(rule.stop_ids) + 1 for rule in rules)])
    stacked = np.full((rows + len(rules), width), NOT_FINITE, np.int64)
    stacked[:rows, : stop_ids.shape[1]] = stop_ids
    for row, rule in enumerate(rules, start=rows):
        stacked[row, : len(rule.stop_ids)] = sorted(rule.stop_ids)
    return stacked
