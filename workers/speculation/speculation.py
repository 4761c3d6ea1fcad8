"""Which rows of a step get drafts, and what becomes of them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.counters import Counters
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.scheduling.decode_rows import DecodeRows, DecodeStep
from tandem.workers.speculation.draft_length import Acceptance, DraftLength, likely_to_hold
from tandem.workers.speculation.drafter import DraftAsk, Drafter
from tandem.workers.speculation.verification import Verification

log = logging.getLogger(__name__)
TRIED = 16  # of so many sequences one gets drafts, while those of a model seldom hold
LIKELY = 6  # tokens that a share counts for, before the first was tried
FEW = 16  # drafts, after which it is known how many of a worker's hold
MOST_PLAIN_STEPS = 48  # behind which drafts of sequences that seldom hold are tried again, where there are many
NO_DRAFT = np.empty(0, np.int64)


class Cost(NamedTuple):
    """In plain steps, what a verify step takes beyond one, for each drafted token, and for each token of the longest
    draft, which a model computes in a step of its own (decisions 0107, 0111 and 0112)."""

    verify: float
    token: float
    draft_step: float = 0.0

    def of(self, sizes: Collection[int]) -> float:
        """Of a step with drafts of these sizes, one or more."""
        return self.verify + self.token * sum(sizes) + self.draft_step * max(sizes)


WAITING = Cost(0.25, 0.012)  # for the tokens of the step before
COMPUTING = Cost(0.25, 0.012, 0.19)  # the same, and then the drafter computes
FOLLOWING = Cost(0.1, 0.006)  # one that is not read yet
FOLLOWING_CHAIN = Cost(0.1, 0.006, 0.12)  # the same, and the drafter computes between both


class Drafted:
    """One request with drafts: its tokens as one array, and how long its next draft should be."""

    def __init__(self, request: DecodeRequest, most: int, share: float) -> None:
        """most: tokens of a draft. share: of drafted tokens that are likely to hold."""
        self.length = DraftLength(most, share)
        self.gave_up = False  # for good: what drafts may lack its last positions
        self.is_trial = False  # its next draft is made whatever it costs
        self._held, self._tried = LIKELY * share, LIKELY  # of all its drafts
        self._request = request
        self._num_prompt = len(request.prompt)
        self._tokens = np.empty(self._num_prompt + request.max_tokens, np.int64)
        self._tokens[: self._num_prompt] = request.prompt
        self._size = self._num_prompt

    @property
    def share(self) -> float:
        """Of all tokens that were tried for it, those that held."""
        return self._held / self._tried

    def verified(self, drafted: int, accepted: int, num_output: int) -> None:
        """See DraftLength.verified."""
        self.length.verified(drafted, accepted, num_output)
        self.is_trial = False
        self._held, self._tried = self._held + accepted, self._tried + min(accepted + 1, drafted)

    def context(self) -> Int64Array:
        """Prompt and output so far, [n]; not to be written to."""
        new = self._request.output[self._size - self._num_prompt :]
        self._tokens[self._size : self._size + len(new)] = new
        self._size += len(new)
        return self._tokens[: self._size]


class Speculation:
    """Owned by the step thread.

    A token is a function of logits, parameters, seed and position. So a verify step samples the target's own token
    behind each drafted one, and what agrees is accepted: output and log-probabilities are those of single steps.
    Requests with LogitRules get no drafts: their state on the device grows by a token a step.

    One row with a draft makes the step one that verifies, for all of them. So drafts that seldom hold wait for others,
    and sequences of which nobody knows begin as the worker's others do.

    A model that drafts takes part in each step, so it costs where nothing holds, too. So a sequence of which few drafts
    hold gives them up for good, and steps of such sequences alone are the target's alone. While most give up, most new
    sequences begin like that.

    Where drafts stay on the device (ModelRunner.next_drafts), a verify step of the same rows is launched before the one
    before is read. Drafts that are looked up the host looks up, too, once it has read the step before: both sides have
    the same tokens then. Those of a model come to the host as samples do.
    """

    def __init__(
        self, drafter: Drafter | None, runner: ModelRunner, tokens: int, max_step_tokens: int, counters: Counters
    ) -> None:
        """drafter: None drafts nothing. tokens: most of a draft. max_step_tokens: most of a verify step, drafted ones
        and one for each row; from as many rows on nothing is drafted."""
        self._drafter = drafter
        self._runner = runner
        self._tokens = tokens
        self._max_step_tokens = max_step_tokens
        self._counters = counters
        self._requests: dict[DecodeRequest, Drafted] = {}
        self._acceptance = Acceptance()
        self._plain_steps = 0  # since the last one with drafts
        self._untried = 0  # sequences since the last one with drafts, while they seldom hold
        self._found = False  # whether the last step that was read had any drafts
        self._last: Verification | None = None  # that was launched

    def propose(self, requests: Sequence[DecodeRequest], *, known: bool) -> list[Int64Array] | None:
        """A draft for each request, behind the tokens of it that are known; None where all would be empty.

        known: whether no step is in flight. With one the drafts are not to be verified: they say that it is worth while
        to wait for its tokens. A drafter that raises is not asked again; requests go on without.
        """
        wanted = self._asks(requests)
        if self._drafter is None or not wanted:
            self._plain_steps += 1
            return None
        if self._drafter.computes and not known:
            return [NO_DRAFT] * len(requests)
        asks = list(wanted.values())
        try:
            proposed = self._drafter.propose(asks)
        except Exception:
            self._leave_drafter()
            return None
        drafts = [NO_DRAFT] * len(requests)
        for index, ask, draft in zip(wanted, asks, proposed, strict=False):
            drafts[index] = draft[: ask.most]
        if self._pays(requests, {index: drafts[index].size for index in wanted}):
            return drafts
        self._plain_steps += 1
        return None

    def _leave_drafter(self) -> None:
        """The drafter has raised."""
        log.exception("the drafter failed; requests go on without drafts")
        self._drafter = None

    def _asks(self, requests: Sequence[DecodeRequest]) -> dict[int, DraftAsk]:
        """By the index of their requests; fewer tokens each, or none, where the step has room for no more."""
        if self._drafter is None or any(request.sliding is not None for request in requests):
            return {}  # a draft would push out of a window what its first token sees
        wanted = [self._wanted(request, len(request.output)) for request in requests]
        asks = {}
        for index, most in self._shared_out(requests, wanted).items():
            request = requests[index]
            assert request.params is not None
            asks[index] = DraftAsk(request.sequence_id, self._requests[request].context(), most, request.params)
        return asks

    def _shared_out(self, requests: Sequence[DecodeRequest], wanted: Sequence[int]) -> dict[int, int]:
        """Tokens to draft, by the index of their row, where the rows want so many; nothing where that does not pay."""
        room = self._max_step_tokens - len(requests)
        indices = [index for index, most in enumerate(wanted) if most > 0]
        share = max(room // max(len(indices), 1), 1)
        counts = {index: min(wanted[index], share) for index in indices[: max(room, 0)]}
        return counts if self._pays(requests, counts) else {}

    def _pays(self, requests: Sequence[DecodeRequest], drafted: Mapping[int, int]) -> bool:
        """Whether a step of these rows is to have so many drafted tokens, by the index of their row."""
        is_trial = any(size and self._requests[requests[index]].is_trial for index, size in drafted.items())
        if not any(drafted.values()) or is_trial or self._plain_steps >= self._most_plain(requests):
            return any(drafted.values())
        worth = sum(self._requests[requests[index]].length.worth(tokens) for index, tokens in drafted.items())
        return worth >= self._cost(requests).of(drafted.values()) * len(requests)

    def _most_plain(self, requests: Sequence[DecodeRequest]) -> int:
        return min(4 * len(requests), MOST_PLAIN_STEPS)

    def _is_hopeless(self, shares: Sequence[float], requests: Sequence[DecodeRequest]) -> bool:
        """Whether a model had better not draft for sequences of whose drafted tokens these shares hold: the longest
        drafts would not pay in a step of these requests."""
        if self._runner.drafts is None or not self._runner.overlaps:
            return False  # without graphs it would take part all the same
        worth = sum(likely_to_hold(share, self._tokens) for share in shares)
        return worth < self._cost(requests).of([self._tokens] * len(shares)) * len(requests)

    def _cost(self, requests: Sequence[DecodeRequest]) -> Cost:
        computes, follows = self._drafter is not None and self._drafter.computes, self._can_follow(requests)
        if computes:
            return FOLLOWING_CHAIN if follows else COMPUTING
        return FOLLOWING if follows else WAITING

    def step(self, rows: DecodeRows, step: DecodeStep) -> PendingSamples:
        """Launches a plain step of all rows."""
        if self._runner.drafts is None:
            return self._runner.step(*step)
        return self._runner.step(*step, alone=self._drafter is None or self._give_up(rows.requests))

    def _give_up(self, requests: Sequence[DecodeRequest]) -> bool:
        """Whether no draft is wanted for any of these, from now on."""
        if any(one.sliding is not None for one in requests):
            return False
        drafted = [self._drafted(one) for one in requests if one.params is not None and not one.params.changes_logits]
        shares = [one.share for one in drafted if not one.gave_up]
        waited = self._acceptance.num_drafts > FEW and self._plain_steps >= self._most_plain(requests) // 2
        if shares and not (waited and self._is_hopeless(shares, requests)):
            return False
        for one in drafted:
            one.gave_up = True
        return True

    def launch(self, rows: DecodeRows, drafts: Sequence[Int64Array], prompt_tokens: int) -> Verification:
        """A verify step of all rows, whose last tokens are known; draft i is of row i. prompt_tokens: see
        StepInFlight."""
        step = rows.next_step()
        assert step is not None, "drafts are of rows"
        self._plain_steps = 0
        parts = [part for index, draft in enumerate(drafts) for part in (step.tokens[index : index + 1], draft)]
        ends = np.cumsum([draft.size + 1 for draft in drafts]).tolist()
        tokens = np.concatenate(parts)
        inputs = [tokens[begin:end] for begin, end in pairwise([0, *ends])]
        pending = self._runner.verify(step.sequence_ids, inputs, step.sampling, step.positions)
        sizes = [draft.size for draft in drafts]
        self._found = True
        self._last = Verification(rows.requests, sizes, drafts, pending, None, tuple(sizes), prompt_tokens)
        return self._last

    def follow(self, rows: DecodeRows, before: Verification) -> Verification | None:
        """A verify step of all rows behind `before`, which is not read yet; the device has its drafts. None where the
        host has to read `before` first."""
        step, next_drafts = rows.next_step(), self._runner.next_drafts
        if step is None or rows.requests is not before.requests or not self._found:
            return None
        if next_drafts is None or self._drafter is None or not self._can_follow(rows.requests):
            return None
        ends = [len(one.output) + size + 1 for one, size in zip(rows.requests, before.sizes, strict=True)]
        if any(_most_output(one) <= end for one, end in zip(rows.requests, ends, strict=True)):
            return None  # its last token may be among those
        wanted = [self._wanted(one, end) for one, end in zip(rows.requests, ends, strict=True)]
        counts = self._shared_out(rows.requests, wanted)
        sizes = [counts.get(index, 0) for index in range(len(rows))]
        if not counts:
            return None
        drafting = None
        if not next_drafts.looks_up:
            drafting = self._draft_behind(step, np.array(sizes))
            if drafting is None:
                return None
        elif before.drafts is not None:
            next_drafts.remember([self._drafted(request).context() for request in rows.requests])
        self._plain_steps = 0
        unknown = [np.zeros(size + 1, np.int64) for size in sizes]
        positions = step.positions + np.array(before.sizes) + 1
        pending = self._runner.verify(step.sequence_ids, unknown, step.sampling, positions, follows=True)
        self._last = Verification(rows.requests, sizes, None, pending, drafting)
        return self._last

    def _draft_behind(self, step: DecodeStep, sizes: Int64Array) -> PendingSamples | None:
        assert self._runner.drafts is not None, "a model drafts"
        try:
            return self._runner.drafts.draft_behind(step.sequence_ids, sizes, step.sampling)
        except Exception:
            self._leave_drafter()
            return None

    def recall(self, step: Verification) -> None:
        """Finds out what the device had as drafts, for a step that followed one which is read by now. In place of what
        was not there to be looked up, or is no token, it took 0."""
        if step.drafts is not None:
            return
        if step.drafting is None:
            self._look_up_again(step)
        else:
            step.drafts = drafts_of(step.drafting.wait().token_ids, step.sizes)
            step.found = step.sizes
        self._found = any(step.found)

    def _look_up_again(self, step: Verification) -> None:
        assert self._drafter is not None
        asks: dict[int, DraftAsk] = {}
        for index, (request, size) in enumerate(zip(step.requests, step.sizes, strict=True)):
            if size and not request.ended:
                assert request.params is not None
                context = self._requests[request].context()
                asks[index] = DraftAsk(request.sequence_id, context, size, request.params)
        step.drafts, found = [np.zeros(size, np.int64) for size in step.sizes], [0] * len(step.sizes)
        for index, draft in zip(asks, self._drafter.propose(list(asks.values())), strict=True):
            found[index] = draft.size
            step.drafts[index][: draft.size] = draft
        step.found = found

    def settle(self, step: Verification, runs: Sequence[TokenRun], cache: PagedKVCache) -> None:
        """Takes back the positions of drafted tokens that do not count. Their pages stay reserved, so that a step that
        follows may write behind the end of a request that stopped among its drafts."""
        surplus: dict[int, int] = {}
        for request, size, drafted, run in zip(step.requests, step.sizes, step.found, runs, strict=True):
            if request.ended:
                continue
            if size + 1 > len(run.token_ids):
                surplus[request.sequence_id] = size + 1 - len(run.token_ids)
            if not drafted:
                continue
            accepted, own = min(len(run.token_ids) - 1, drafted), self._requests[request]
            own.verified(drafted, accepted, len(request.output) + len(run.token_ids))
            own.gave_up = self._is_hopeless([own.share], [request])
            self._acceptance.verified(drafted, accepted)
            self._counters.drafted_tokens += drafted
            self._counters.accepted_tokens += accepted
            if request.token_stream is not None:
                request.token_stream.drafted += drafted
                request.token_stream.accepted += accepted
        if surplus:
            cache.pop_each(tuple(surplus), list(surplus.values()))
            if self._runner.drafts is not None and step is not self._last:
                self._runner.drafts.moved_back(surplus)

    def forget(self, request: DecodeRequest) -> None:
        """The request has ended. Idempotent."""
        if self._requests.pop(request, None) is not None and self._drafter is not None:
            self._drafter.forget(request.sequence_id)

    def _wanted(self, request: DecodeRequest, num_output: int) -> int:
        """Tokens to draft for it behind so many output tokens: beside those the step gives one, which may be the
        last."""
        assert request.params is not None
        left = _most_output(request) - num_output - 1
        if left <= 0 or request.params.changes_logits:
            return 0
        drafted = self._drafted(request)
        return 0 if drafted.gave_up else min(drafted.length.next(num_output), left)

    def _drafted(self, request: DecodeRequest) -> Drafted:
        if request not in self._requests:
            self._requests[request] = drafted = Drafted(request, self._tokens, self._acceptance.share)
            if self._is_hopeless([self._acceptance.share], [request]):
                self._untried = (self._untried + 1) % TRIED
                drafted.is_trial = self._untried == 0
                drafted.gave_up = not drafted.is_trial
        return self._requests[request]

    def _can_follow(self, requests: Sequence[DecodeRequest]) -> bool:
        """Whether a verify step of theirs may be launched before the one before is read."""
        next_drafts = self._runner.next_drafts
        if next_drafts is None or not next_drafts.takes(len(requests)):
            return False
        return not any(one.params is not None and one.params.changes_logits for one in requests)


def drafts_of(sampled: Int64Array, sizes: Sequence[int]) -> list[Int64Array]:
    """Of each sequence, of those drafted tokens, from what Drafts.draft_behind has sampled."""
    whose = np.flatnonzero(sizes)
    drafted = np.where(sampled == NOT_FINITE, 0, sampled).reshape(-1, whose.size)
    drafts = [NO_DRAFT] * len(sizes)
    for column, index in enumerate(whose.tolist()):
        drafts[index] = drafted[: sizes[index], column]
    return drafts


def _most_output(request: DecodeRequest) -> int:
    assert request.rule is not None
    return request.rule.max_tokens
