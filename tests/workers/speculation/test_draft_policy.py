"""Which steps have drafts, of batches whose tokens are known beforehand; no model, no cache."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.counters import Counters
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.speculation.speculation import Speculation

MOST, MOST_STEP_TOKENS = 4, 32
VERIFY_COST = 0.25  # what a step with drafts takes beyond a plain one, as measured with 3 drafts of one row
Holds = Callable[[int], float]  # by the number of the sequence, from 0


class Zeros:
    computes = False

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return [np.zeros(ask.most, np.int64) for ask in asks]

    def forget(self, sequence_id: int) -> None:
        pass


class Ran(NamedTuple):
    steps: int
    verified: int
    tokens: int

    @property
    def gain(self) -> float:
        """Output per time, of what it is in plain steps."""
        return self.tokens / (self.steps + VERIFY_COST * self.verified)


@dataclass(eq=False)
class Request:
    """What speculation reads of one."""

    sequence_id: int
    max_tokens: int
    rule: Any
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=lambda: [0])
    params: SamplingParams = field(default_factory=SamplingParams)
    sliding: None = None
    ended: bool = False
    token_stream: None = None


class Batches:
    """A worker whose drafter's tokens hold, each, with a probability."""

    def __init__(self) -> None:
        self.speculation = Speculation(Zeros(), MOST, MOST_STEP_TOKENS, Counters())
        self._numbers, self._draws = itertools.count(), random.Random(1)
        self._pops = SimpleNamespace(pop_each=lambda ids, counts: None)
        self._runner = SimpleNamespace(verify=lambda *step: None)

    def run(self, rows: int, length: int, steps: int, holds: Holds) -> Ran:
        """So many sequences at a time, each of `length` tokens. tokens: of an average row."""
        batch = [self._request(length) for _ in range(rows)]
        verified = tokens = 0
        for _ in range(steps):
            drafts = self.speculation.propose(batch, known=True)
            runs = [self._run(one, drafts[row] if drafts else (), holds) for row, one in enumerate(batch)]
            if drafts is not None:
                verified += 1
                step = SimpleNamespace(sequence_ids=[], tokens=np.zeros(rows, np.int64), sampling=None, positions=None)
                stepped = cast(DecodeRows, SimpleNamespace(next_step=lambda step=step: step, requests=batch))
                launched = self.speculation.launch(cast(ModelRunner, self._runner), stepped, drafts, 0)
                self.speculation.settle(launched, runs, cast(PagedKVCache, self._pops))
            for row, run in enumerate(runs):
                tokens += len(run.token_ids)
                batch[row].output.extend(run.token_ids)
                if len(batch[row].output) >= length:
                    self.speculation.forget(batch[row])
                    batch[row] = self._request(length)
        return Ran(steps, verified, round(tokens / rows))

    def _run(self, request: DecodeRequest, draft: Sequence[int] | Int64Array, holds: Holds) -> TokenRun:
        probability, count = holds(request.sequence_id), 1
        while count <= len(draft) and self._draws.random() < probability:
            count += 1
        return TokenRun([0] * count, [None] * count, FinishReason.RUNNING)

    def _request(self, length: int) -> DecodeRequest:
        return cast(DecodeRequest, Request(next(self._numbers), length, SimpleNamespace(max_tokens=length)))


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 31])
@pytest.mark.parametrize("length", [40, 1000])
def test_drafts_that_never_hold_cost_little(rows: int, length: int) -> None:
    """Also where sequences are short, so that new ones come all the time."""
    batches = Batches()
    batches.run(rows, length, 200, lambda number: 0.0)
    ran = batches.run(rows, length, 1000, lambda number: 0.0)
    assert ran.verified > 0, "they are tried again"
    assert ran.gain >= 0.97


@pytest.mark.parametrize("rows", [32, 64])
def test_large_batches_draft_nothing(rows: int) -> None:
    assert Batches().run(rows, 200, 100, lambda number: 0.9).verified == 0


@pytest.mark.parametrize("holds", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("rows", [1, 8, 16, 24, 28, 31])
def test_no_batch_is_slower_for_its_drafts(rows: int, holds: float) -> None:
    assert Batches().run(rows, 200, 500, lambda number: holds).gain >= 0.98


@pytest.mark.parametrize(("rows", "gain"), [(1, 1.8), (4, 1.7), (8, 1.5)])
def test_drafts_that_mostly_hold_pay(rows: int, gain: float) -> None:
    assert Batches().run(rows, 200, 1000, lambda number: 0.7).gain >= gain


def test_one_sequence_without_luck_takes_nothing_from_others() -> None:
    unlucky = Batches().run(4, 200, 1000, lambda number: 0.0 if number == 0 else 0.7)
    assert unlucky.gain >= 0.95 * Batches().run(4, 200, 1000, lambda number: 0.7).gain


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_drafts_are_made_again_when_they_hold(rows: int) -> None:
    batches = Batches()
    batches.run(rows, 200, 1000, lambda number: 0.0)
    batches.run(rows, 200, 300, lambda number: 0.7)
    assert batches.run(rows, 200, 300, lambda number: 0.7).gain >= 1.4
