"""Speculative decoding: proposes drafts, launches steps that verify them, and accepts or takes back their tokens."""

import logging
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.counters import Counters
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import DraftsFailed, Step, StepDrafts
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.scheduling.batch import DecodeStep
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.speculation.draft_policy import DraftPolicy, most_output
from tandem.workers.speculation.drafter import DraftAsk, Drafter
from tandem.workers.speculation.verification import Verification

log = logging.getLogger(__name__)
NO_DRAFT = np.empty(0, np.int64)


class Speculation:
    """Owned by the step thread.

    A token is a function of logits, parameters, seed and position. So a verify step samples the target's own token
    after each drafted one, and accepts drafts as long as they are equal. Output and log-probabilities are the same as
    with single steps. Requests with LogitRules get no drafts, because their state on the device grows by one token a
    step.

    If drafts stay on the device (see Capabilities), the next verify step of the same rows is launched before the
    previous one is read. The host repeats an n-gram look-up once it has read the previous step, and finds the same
    tokens as the device. A model's drafts come to the host as samples do.
    """

    def __init__(
        self, drafter: Drafter | None, engine: Engine, tokens: int, max_step_tokens: int, counters: Counters
    ) -> None:
        """drafter: None for no drafts. tokens: most tokens of a draft. max_step_tokens: most tokens of a verify step,
        drafted ones and one for each row. A step with that many rows has no drafts."""
        computes = drafter is not None and drafter.computes
        self._drafter = drafter
        self._engine = engine
        self._counters = counters
        self._policy = DraftPolicy(engine, tokens, max_step_tokens, computes=computes)
        self._found = False  # whether the last step that was read had any drafts
        self._last: Verification | None = None  # the last one that was launched
        self._tokens = tokens
        self._stepped: list[DecodeRequest] | None = None  # rows of the last step; None if it also had prompt chunks

    def propose(self, requests: Sequence[DecodeRequest], *, known: bool) -> list[Int64Array] | None:
        """A draft for each request, after its known tokens; None if all would be empty.

        known: whether no step is in flight. Otherwise the drafts cannot be verified yet. They only show that waiting
        for the step's tokens would pay. A drafter that raises is not asked again, and requests continue without drafts.
        """
        drafts = self._propose(requests, known=known)
        if drafts is None:
            self._policy.launched(verifies=False)
        return drafts

    def _propose(self, requests: Sequence[DecodeRequest], *, known: bool) -> list[Int64Array] | None:
        if self._drafter is None or any(request.prompt.sliding is not None for request in requests):
            return None  # a draft would push tokens out of the window that its first token attends to
        sizes = self._policy.sizes(requests, [len(request.output) for request in requests])
        if not sizes:
            return None
        if self._drafter.computes and not known:
            return [NO_DRAFT] * len(requests)
        try:
            proposed = self._drafter.propose([self._ask(requests[index], most) for index, most in sizes.items()])
        except Exception:
            self._leave_drafter()
            return None
        drafts = [NO_DRAFT] * len(requests)
        for (index, most), draft in zip(sizes.items(), proposed, strict=False):
            drafts[index] = draft[:most]
        return drafts if self._policy.pays(requests, {index: drafts[index].size for index in sizes}) else None

    def _ask(self, request: DecodeRequest, most: int) -> DraftAsk:
        assert request.params is not None
        return DraftAsk(request.sequence_id, self._policy.of(request).context(), most, request.params)

    def _leave_drafter(self) -> None:
        """Stops drafting after the drafter has raised."""
        log.exception("the drafter failed; requests continue without drafts")
        self._drafter = None

    def step(self, rows: DecodeRows, step: DecodeStep) -> PendingSamples:
        """Launches a plain step of all rows."""
        has_model = self._engine.capabilities.drafts
        alone = has_model and (self._drafter is None or self._policy.gives_up(rows.requests))
        self._note_step(rows)
        pending = self._engine.launch(Step(step, alone=alone)).rows
        assert pending is not None, "the step has rows"
        return pending

    def launch(self, rows: DecodeRows, step: DecodeStep, drafts: Sequence[Int64Array]) -> Verification:
        """Launches a verify step of all rows, whose last tokens are known. drafts: one for each row. step: the plain
        step that it replaces."""
        self._policy.launched(verifies=True)
        self._note_step(rows)
        parts = [part for index, draft in enumerate(drafts) for part in (step.tokens[index : index + 1], draft)]
        ends = np.cumsum([draft.size + 1 for draft in drafts]).tolist()
        tokens = np.concatenate(parts)
        inputs = [tokens[begin:end] for begin, end in pairwise([0, *ends])]
        pending = self._engine.launch(Step(step, StepDrafts(inputs))).rows
        assert pending is not None, "the step has rows"
        sizes = [draft.size for draft in drafts]
        self._found = True
        self._last = Verification(rows.requests, sizes, drafts, pending, None, tuple(sizes), verifier=self, rows=rows)
        return self._last

    def follow(self, rows: DecodeRows) -> Verification | None:
        """Launches a verify step of all rows after the last one, which is not read yet and whose drafts the device has.
        None if the host must read that step first."""
        step, before = rows.next_step(), self._last
        if step is None or before is None or rows.requests is not before.requests or not self._found:
            return None
        if self._drafter is None or not self._policy.can_follow(rows.requests):
            return None
        ends = [len(one.output) + size + 1 for one, size in zip(rows.requests, before.sizes, strict=True)]
        if any(most_output(one) <= end for one, end in zip(rows.requests, ends, strict=True)):
            return None  # the last step may already hold the request's last token
        counts = self._policy.sizes(rows.requests, ends)
        if not counts:
            return None
        sizes = [counts.get(index, 0) for index in range(len(rows))]
        positions = step.positions + np.array(before.sizes) + 1
        try:
            launched = self._engine.launch(Step(step._replace(positions=positions), self._following(before, sizes)))
        except DraftsFailed:
            self._leave_drafter()
            return None
        if launched.rows is None:
            return None
        self._policy.launched(verifies=True)
        self._note_step(rows)
        self._last = Verification(rows.requests, sizes, None, launched.rows, launched.drafts, verifier=self, rows=rows)
        return self._last

    def passed_over(self) -> None:
        """Notes a step of the rows with prompt chunks, which has no drafts."""
        self._stepped = None

    def _note_step(self, rows: DecodeRows) -> None:
        """Tells the policy whether this step could have followed the previous one (see follow()), had both verified
        drafts."""
        steady = rows.requests is self._stepped and rows.steps_left > 2 * (self._tokens + 1)
        self._policy.stepped(steady=steady)
        self._stepped = rows.requests

    def _following(self, before: Verification, sizes: Sequence[int]) -> StepDrafts:
        """Drafts of these sizes after a verify step that is not read yet. Only the device has their tokens."""
        unknown = [np.zeros(size + 1, np.int64) for size in sizes]
        if not self._engine.capabilities.looks_up:
            return StepDrafts(unknown, True, np.array(sizes))
        known = before.drafts is not None
        contexts = [self._policy.of(request).context() for request in before.requests] if known else ()
        return StepDrafts(unknown, True, contexts=contexts)

    def recall(self, step: Verification) -> None:
        """Reconstructs the device's drafts of a step that followed another, which is read by now. The device used token
        0 where a look-up found nothing, or where a sample was no token."""
        if step.drafting is None:
            self._look_up_again(step)
        else:
            step.drafts = drafts_of(step.drafting.wait().token_ids, step.sizes)
            step.found = step.sizes
        self._found = any(step.found)

    def _look_up_again(self, step: Verification) -> None:
        assert self._drafter is not None
        asked = [
            index
            for index, (request, size) in enumerate(zip(step.requests, step.sizes, strict=True))
            if size and not request.ended
        ]
        asks = [self._ask(step.requests[index], step.sizes[index]) for index in asked]
        step.drafts, found = [np.zeros(size, np.int64) for size in step.sizes], [0] * len(step.sizes)
        for index, draft in zip(asked, self._drafter.propose(asks), strict=True):
            found[index] = draft.size
            step.drafts[index][: draft.size] = draft
        step.found = found

    def settle(self, step: Verification, runs: Sequence[TokenRun]) -> None:
        """Takes back the positions of rejected tokens. Their pages stay reserved, because a following step may still
        write past the end of a request that stopped within its draft."""
        surplus: dict[int, int] = {}
        for request, size, drafted, run in zip(step.requests, step.sizes, step.found, runs, strict=True):
            if request.ended:
                continue
            if size + 1 > len(run.token_ids):
                surplus[request.sequence_id] = size + 1 - len(run.token_ids)
            if not drafted:
                continue
            accepted = min(len(run.token_ids) - 1, drafted)
            self._policy.verified(request, drafted, accepted, len(request.output) + len(run.token_ids))
            self._counters.drafted_tokens += drafted
            self._counters.accepted_tokens += accepted
            if request.token_stream is not None:
                request.token_stream.drafted += drafted
                request.token_stream.accepted += accepted
        if surplus:
            self._engine.take_back(surplus, is_last=step is self._last)

    def forget(self, request: DecodeRequest) -> None:
        """Forgets a request that has ended. Idempotent."""
        if self._policy.forget(request) and self._drafter is not None:
            self._drafter.forget(request.sequence_id)


def drafts_of(sampled: Int64Array, sizes: Sequence[int]) -> list[Int64Array]:
    """Each sequence's draft, from the samples of Drafts.draft_behind. sizes: drafted tokens of each sequence."""
    whose = np.flatnonzero(sizes)
    drafted = np.where(sampled == NOT_FINITE, 0, sampled).reshape(-1, whose.size)
    drafts = [NO_DRAFT] * len(sizes)
    for column, index in enumerate(whose.tolist()):
        drafts[index] = drafted[: sizes[index], column]
    return drafts
