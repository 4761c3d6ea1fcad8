"""Which rows of a step get drafts, and how long ones: by what drafts cost and how many of late have held."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.engine.engine import Engine
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.speculation.draft_length import Acceptance, DraftLength, likely_to_hold

TRIED = 16  # of so many sequences one gets drafts, while those of a model seldom hold
LIKELY = 3  # tokens that a share counts for, before the first was tried
STEADY_WEIGHT = 0.05  # of the newest step among those that say how often a verify step can follow another
FEW = 16  # drafts, after which it is known how many of a worker's hold
MOST_PLAIN_STEPS = 48  # behind which drafts of sequences that seldom hold are tried again, where there are many


class Cost(NamedTuple):
    """In plain steps, what a verify step takes beyond one, for each drafted token, and for each token of the longest
    draft, which a model computes in a step of its own (decisions 0107 and 0111 to 0113)."""

    verify: float
    token: float
    draft_step: float = 0.0

    def of(self, sizes: Collection[int]) -> float:
        """Of a step with drafts of these sizes, one or more."""
        return self.verify + self.token * sum(sizes) + self.draft_step * max(sizes)

    def mixed(self, other: "Cost", eighths: int) -> "Cost":
        """So many of eight steps cost what `other` says."""
        return Cost(*(mine + (its - mine) * eighths / 8 for mine, its in zip(self, other, strict=True)))


WAITING = Cost(0.25, 0.009)  # for the tokens of the step before
COMPUTING = Cost(0.4, 0.006, 0.19)  # the same, and then the drafter computes
FOLLOWING = Cost(0.08, 0.004)  # one that is not read yet
FOLLOWING_CHAIN = Cost(0.09, 0.0025, 0.06)  # the same, and the drafter computes between both


@lru_cache(1024)
def best_lengths(cost: Cost, rows: int, most: int) -> tuple[int, ...]:
    """How many tokens, 1 to `most`, to draft for each of so many sequences, by the share that holds, in hundredths from
    0 to 100: then a step gives the most output per time."""

    def gain(share: float, drafted: int) -> float:
        return (1 + likely_to_hold(share, drafted)) / (1 + cost.of([drafted] * rows))

    return tuple(max(range(1, most + 1), key=partial(gain, share / 100)) for share in range(101))


class Drafted:
    """One request with drafts: its tokens as one array, and how long its next draft should be."""

    def __init__(self, request: DecodeRequest, share: float) -> None:
        """share: of drafted tokens that are likely to hold."""
        self.length = DraftLength(share)
        self.gave_up = False  # for good: what drafts may lack its last positions
        self.is_trial = False  # its next draft is made whatever it costs
        self._held, self._tried = LIKELY * share, LIKELY  # of all its drafts
        self._request = request
        self._num_prompt = len(request.prompt)
        self._tokens = np.empty(self._num_prompt + request.max_tokens, np.int64)
        self._tokens[: self._num_prompt] = request.prompt.token_ids
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


class DraftPolicy:
    """One row with a draft makes the step one that verifies, for all of them. So drafts that seldom hold wait for
    others, and sequences of which nobody knows begin as the worker's others do.

    A model that drafts takes part in each step, so it costs where nothing holds, too. So a sequence of which few drafts
    hold gives them up for good, and steps of such sequences alone are the target's alone (decision 0114). While most
    give up, most new sequences begin like that.
    """

    def __init__(self, engine: Engine, tokens: int, max_step_tokens: int, *, computes: bool) -> None:
        """tokens, max_step_tokens: see Speculation. computes: see Drafter."""
        self._engine = engine
        self._tokens = tokens
        self._max_step_tokens = max_step_tokens
        self._computes = computes
        self._requests: dict[DecodeRequest, Drafted] = {}
        self._acceptance = Acceptance()
        self._plain_steps = 0  # since the last one with drafts
        self._untried = 0  # sequences since the last one with drafts, while they seldom hold
        self._steady = 1.0  # of steps of late, the part in whose place a verify step could have followed another

    def of(self, request: DecodeRequest) -> Drafted:
        """What is known of it, from its first draft to forget()."""
        if request not in self._requests:
            self._requests[request] = drafted = Drafted(request, self._acceptance.share)
            if self._is_hopeless([self._acceptance.share], [request]):
                self._untried = (self._untried + 1) % TRIED
                drafted.is_trial = self._untried == 0
                drafted.gave_up = not drafted.is_trial
        return self._requests[request]

    def forget(self, request: DecodeRequest) -> bool:
        """The request has ended. Whether it was known."""
        return self._requests.pop(request, None) is not None

    def sizes(self, requests: Sequence[DecodeRequest], num_output: Sequence[int]) -> dict[int, int]:
        """Tokens to draft behind so many output tokens of each, by the index of their row: fewer, or none, where the
        step has room for no more; nothing where that does not pay."""
        best = best_lengths(self._cost(requests, self._steady), len(requests), self._tokens)
        wanted = [self._wanted(request, count, best) for request, count in zip(requests, num_output, strict=True)]
        room = self._max_step_tokens - len(requests)
        indices = [index for index, most in enumerate(wanted) if most > 0]
        share = max(room // max(len(indices), 1), 1)
        counts = {index: min(wanted[index], share) for index in indices[: max(room, 0)]}
        return counts if self.pays(requests, counts) else {}

    def pays(self, requests: Sequence[DecodeRequest], drafted: Mapping[int, int]) -> bool:
        """Whether a step of these rows is to have so many drafted tokens, by the index of their row."""
        is_trial = any(size and self._requests[requests[index]].is_trial for index, size in drafted.items())
        if not any(drafted.values()) or is_trial or self._plain_steps >= _most_plain(requests):
            return any(drafted.values())
        worth = sum(self._requests[requests[index]].length.worth(tokens) for index, tokens in drafted.items())
        return worth >= self._cost(requests, self._steady).of(drafted.values()) * len(requests)

    def stepped(self, *, steady: bool) -> None:
        """A step without chunks was launched. steady: it could follow the one before, if both verified drafts. Where
        sequences join and end all the time few steps can, so drafts are expected to cost what those cost that wait."""
        self._steady += STEADY_WEIGHT * (steady - self._steady)

    def launched(self, *, verifies: bool) -> None:
        """A step with drafts, or one that could have had some."""
        self._plain_steps = 0 if verifies else self._plain_steps + 1

    def verified(self, request: DecodeRequest, drafted: int, accepted: int, num_output: int) -> None:
        """See DraftLength.verified."""
        own = self._requests[request]
        own.verified(drafted, accepted, num_output)
        own.gave_up = self._is_hopeless([own.share], [request])
        self._acceptance.verified(drafted, accepted)

    def gives_up(self, requests: Sequence[DecodeRequest]) -> bool:
        """Whether no draft of a model is wanted for any of these, from now on: asked before each plain step of them."""
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
        """Whether a verify step of theirs may be launched before the one before is read."""
        if len(requests) > self._engine.capabilities.most_following:
            return False
        return not any(one.params is not None and one.params.changes_logits for one in requests)

    def _wanted(self, request: DecodeRequest, num_output: int, best: Sequence[int]) -> int:
        """Tokens to draft for it: beside those the step gives one, which may be the last. best: best_lengths()."""
        assert request.params is not None
        left = most_output(request) - num_output - 1
        if left <= 0 or request.params.changes_logits:
            return 0
        drafted = self.of(request)
        return 0 if drafted.gave_up else min(drafted.length.next(num_output, best), left)

    def _is_hopeless(self, shares: Sequence[float], requests: Sequence[DecodeRequest]) -> bool:
        """Whether a model had better not draft for sequences of whose drafted tokens these shares hold: the longest
        drafts would not pay in a step of these requests."""
        able = self._engine.capabilities
        if not able.drafts or not able.overlaps:
            return False  # without graphs it would take part all the same
        worth = sum(likely_to_hold(share, self._tokens) for share in shares)
        return worth < self._cost(requests, 1.0).of([self._tokens] * len(shares)) * len(requests)

    def _cost(self, requests: Sequence[DecodeRequest], steady: float) -> Cost:
        waits, follows = (COMPUTING, FOLLOWING_CHAIN) if self._computes else (WAITING, FOLLOWING)
        return waits.mixed(follows, round(8 * steady)) if self.can_follow(requests) else waits


def most_output(request: DecodeRequest) -> int:
    """Tokens."""
    assert request.rule is not None
    return request.rule.max_tokens


def _most_plain(requests: Sequence[DecodeRequest]) -> int:
    return min(4 * len(requests), MOST_PLAIN_STEPS)
