"""Chooses the rows of a step that get drafts, and their lengths, by the cost of drafts and recent acceptance rates."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.engine.engine import Engine
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.speculation.draft_length import Acceptance, DraftLength, likely_to_hold

TRIED = 16  # one of so many new sequences gets drafts while a model's drafts are rarely accepted
LIKELY = 3  # tokens that the assumed acceptance rate of a new sequence counts for
STEADY_WEIGHT = 0.05  # weight of the newest step in the share of steps that can follow a verify step
FEW = 16  # drafts, after which a worker knows its acceptance rate
MOST_PLAIN_STEPS = 48  # at most, before rarely accepted drafts are tried again in a large batch


class Cost(NamedTuple):
    """The extra cost of a verify step over a plain step, in plain steps (decisions 0107 and 0111 to 0113)."""

    verify: float  # for the step itself
    token: float  # for each drafted token
    draft_step: float = 0.0  # for each token of the longest draft: the drafting model computes one step for each

    def of(self, sizes: Collection[int]) -> float:
        """The cost of a step with drafts of these sizes, at least one."""
        return self.verify + self.token * sum(sizes) + self.draft_step * max(sizes)

    def mixed(self, other: "Cost", eighths: int) -> "Cost":
        """Returns the mean cost if `eighths` of eight steps cost `other`."""
        return Cost(*(mine + (its - mine) * eighths / 8 for mine, its in zip(self, other, strict=True)))


WAITING = Cost(0.25, 0.009)  # the host first reads the previous step's tokens
COMPUTING = Cost(0.4, 0.006, 0.19)  # the same, then a model computes the drafts
FOLLOWING = Cost(0.08, 0.004)  # launched before the host has read the previous step
FOLLOWING_CHAIN = Cost(0.09, 0.0025, 0.06)  # the same, with a model that computes the drafts between both steps


@lru_cache(1024)
def best_lengths(cost: Cost, rows: int, most: int) -> tuple[int, ...]:
    """The draft length, 1 to `most`, that gives the most output per time for `rows` sequences. Entry i is for an
    acceptance rate of i percent, 0 to 100."""

    def gain(share: float, drafted: int) -> float:
        return (1 + likely_to_hold(share, drafted)) / (1 + cost.of([drafted] * rows))

    return tuple(max(range(1, most + 1), key=partial(gain, share / 100)) for share in range(101))


class Drafted:
    """A request with drafts: its tokens as one array, and the length of its next draft."""

    def __init__(self, request: DecodeRequest, share: float) -> None:
        """share: the acceptance rate to assume at first."""
        self.length = DraftLength(share)
        self.gave_up = False  # for good: the drafting model may lack its last positions
        self.is_trial = False  # its next draft is made at any cost
        self._held, self._tried = LIKELY * share, LIKELY  # tokens of all its drafts
        self._request = request
        self._num_prompt = len(request.prompt)
        self._tokens = np.empty(self._num_prompt + request.max_tokens, np.int64)
        self._tokens[: self._num_prompt] = request.prompt.token_ids
        self._size = self._num_prompt

    @property
    def share(self) -> float:
        """Its acceptance rate over all its drafts."""
        return self._held / self._tried

    def verified(self, drafted: int, accepted: int, num_output: int) -> None:
        """See DraftLength.verified."""
        self.length.verified(drafted, accepted, num_output)
        self.is_trial = False
        self._held, self._tried = self._held + accepted, self._tried + min(accepted + 1, drafted)

    def context(self) -> Int64Array:
        """Prompt and output so far, int64 [n]. The caller must not write to it."""
        new = self._request.output[self._size - self._num_prompt :]
        self._tokens[self._size : self._size + len(new)] = new
        self._size += len(new)
        return self._tokens[: self._size]


class DraftPolicy:
    """Decides by costs, because one draft makes the whole batch take a verify step.

    Sequences whose drafts are rarely accepted are therefore verified only together with others. New sequences start
    with the worker's recent acceptance rate.

    A drafting model takes part in each step, so it costs time even if nothing is accepted. So a sequence with few
    accepted drafts gives them up for good, and steps of only such sequences leave the model out (decision 0114). While
    most sequences give up, most new ones start without drafts.
    """

    def __init__(self, engine: Engine, tokens: int, max_step_tokens: int, *, computes: bool) -> None:
        """tokens, max_step_tokens: see Speculation. computes: see Drafter."""
        self._engine = engine
        self._tokens = tokens
        self._max_step_tokens = max_step_tokens
        self._computes = computes
        self._requests: dict[DecodeRequest, Drafted] = {}
        self._acceptance = Acceptance()
        self._plain_steps = 0  # since the last verify step
        self._untried = 0  # new sequences without drafts, since the last one that tries some
        self._steady = 1.0  # share of recent steps that could have followed a verify step without waiting

    def of(self, request: DecodeRequest) -> Drafted:
        """Returns the record of a request, which is kept until forget()."""
        if request not in self._requests:
            self._requests[request] = drafted = Drafted(request, self._acceptance.share)
            if self._is_hopeless([self._acceptance.share], [request]):
                self._untried = (self._untried + 1) % TRIED
                drafted.is_trial = self._untried == 0
                drafted.gave_up = not drafted.is_trial
        return self._requests[request]

    def forget(self, request: DecodeRequest) -> bool:
        """Drops the record of a request that has ended. False if there was none."""
        return self._requests.pop(request, None) is not None

    def sizes(self, requests: Sequence[DecodeRequest], num_output: Sequence[int]) -> dict[int, int]:
        """How many tokens to draft for each row, by its index; empty if drafts would not pay. num_output: output tokens
        of each request so far. Rows get fewer tokens, or none, if the step has no room for more."""
        best = best_lengths(self._cost(requests, self._steady), len(requests), self._tokens)
        wanted = [self._wanted(request, count, best) for request, count in zip(requests, num_output, strict=True)]
        room = self._max_step_tokens - len(requests)
        indices = [index for index, most in enumerate(wanted) if most > 0]
        share = max(room // max(len(indices), 1), 1)
        counts = {index: min(wanted[index], share) for index in indices[: max(room, 0)]}
        return counts if self.pays(requests, counts) else {}

    def pays(self, requests: Sequence[DecodeRequest], drafted: Mapping[int, int]) -> bool:
        """Whether a verify step with these drafts is worth its cost. drafted: tokens by the index of their row."""
        is_trial = any(size and self._requests[requests[index]].is_trial for index, size in drafted.items())
        if not any(drafted.values()) or is_trial or self._plain_steps >= _most_plain(requests):
            return any(drafted.values())
        worth = sum(self._requests[requests[index]].length.worth(tokens) for index, tokens in drafted.items())
        return worth >= self._cost(requests, self._steady).of(drafted.values()) * len(requests)

    def stepped(self, *, steady: bool) -> None:
        """Notes a launched step without prompt chunks. steady: whether it could have followed the previous step without
        waiting, had both verified drafts. If sequences join and end all the time, few steps can, and drafts are taken
        to cost as much as with waiting."""
        self._steady += STEADY_WEIGHT * (steady - self._steady)

    def launched(self, *, verifies: bool) -> None:
        """Notes a launched step that could have drafts. verifies: whether it has."""
        self._plain_steps = 0 if verifies else self._plain_steps + 1

    def verified(self, request: DecodeRequest, drafted: int, accepted: int, num_output: int) -> None:
        """See DraftLength.verified."""
        own = self._requests[request]
        own.verified(drafted, accepted, num_output)
        own.gave_up = self._is_hopeless([own.share], [request])
        self._acceptance.verified(drafted, accepted)

    def gives_up(self, requests: Sequence[DecodeRequest]) -> bool:
        """Whether a model need not draft for any of these from now on. Called before each plain step."""
        if any(one.prompt.sliding is not None for one in requests):
            return False
        drafted = [self.of(one) for one in requests if one.params is not None and not one.params.changes_logits]
        shares = [one.share for one in drafted if not one.gave_up]
        waited = self._acceptance.num_drafts > FEW and self._plain_steps >= _most_plain(requests) // 2
        if shares and not (waited and self._is_hopeless(shares, requests)):
            return False
        for one in drafted:
            one.gave_up = True
        return True

    def can_follow(self, requests: Sequence[DecodeRequest]) -> bool:
        """Whether their next verify step may be launched before the previous one is read."""
        if len(requests) > self._engine.capabilities.most_following:
            return False
        return not any(one.params is not None and one.params.changes_logits for one in requests)

    def _wanted(self, request: DecodeRequest, num_output: int, best: Sequence[int]) -> int:
        """Tokens to draft for a request. The step itself yields one more, which may be its last. best:
        best_lengths()."""
        assert request.params is not None
        left = most_output(request) - num_output - 1
        if left <= 0 or request.params.changes_logits:
            return 0
        drafted = self.of(request)
        return 0 if drafted.gave_up else min(drafted.length.next(num_output, best), left)

    def _is_hopeless(self, shares: Sequence[float], requests: Sequence[DecodeRequest]) -> bool:
        """Whether a model's drafts cannot pay at these acceptance rates, not even the longest ones, in a step of these
        requests."""
        able = self._engine.capabilities
        if not able.drafts or not able.overlaps:
            return False  # without CUDA graphs the model takes part in each step anyway
        worth = sum(likely_to_hold(share, self._tokens) for share in shares)
        return worth < self._cost(requests, 1.0).of([self._tokens] * len(shares)) * len(requests)

    def _cost(self, requests: Sequence[DecodeRequest], steady: float) -> Cost:
        waits, follows = (COMPUTING, FOLLOWING_CHAIN) if self._computes else (WAITING, FOLLOWING)
        return waits.mixed(follows, round(8 * steady)) if self.can_follow(requests) else waits


def most_output(request: DecodeRequest) -> int:
    """The most output tokens of a request."""
    assert request.rule is not None
    return request.rule.max_tokens


def _most_plain(requests: Sequence[DecodeRequest]) -> int:
    return min(4 * len(requests), MOST_PLAIN_STEPS)
