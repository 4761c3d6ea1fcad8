"""Batches of sequences whose drafted tokens hold with a probability: which steps have drafts, without a model."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.counters import Counters
from tandem.workers.engine.capabilities import Capabilities
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import Launched
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import DecodeStep
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.speculation.drafter import DraftAsk
from tandem.workers.speculation.speculation import Speculation
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.support.prompt_specs import spec_of

Holds = Callable[[int], float]  # by the number of the sequence, from 0


class Zeros:
    def __init__(self, *, computes: bool) -> None:
        self.computes = computes

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return [np.zeros(ask.most, np.int64) for ask in asks]

    def forget(self, sequence_id: int) -> None:
        pass


@dataclass(eq=False)
class Request:
    """The parts of a request that speculation reads."""

    sequence_id: int
    max_tokens: int
    rule: Any
    prompt: PromptSpec = field(default_factory=lambda: spec_of([0]))
    output: list[int] = field(default_factory=lambda: [0])
    params: SamplingParams = field(default_factory=SamplingParams)
    ended: bool = False
    token_stream: None = None


class DraftedBatch:
    """A batch with so many sequences at a time, each of `length` tokens. A new sequence replaces each that ends."""

    def __init__(self, speculation: Speculation, rows: int, length: int, holds: Holds, *, steady: bool = True) -> None:
        """steady: whether a step has the rows of the previous one; else as many other rows."""
        self._speculation, self._length, self._holds, self._steady = speculation, length, holds, steady
        self._numbers, self._draws = itertools.count(), random.Random(1)
        self._requests = [self._request() for _ in range(rows)]
        self.alone = 0  # plain steps without the model that drafts

    def propose(self) -> list[int] | None:
        """Returns the tokens drafted for each sequence in the next step; its earlier tokens are known. None without
        drafts."""
        drafts = self._speculation.propose(self._requests, known=True)
        return None if drafts is None else [draft.size for draft in drafts]

    def step(self, drafted: Sequence[int] | None) -> list[int]:
        """Ends a step with the drafts of propose(). Returns how many drafted tokens hold, by sequence."""
        sizes = drafted or [0] * len(self._requests)
        accepted = [self._accepted(one, size) for one, size in zip(self._requests, sizes, strict=True)]
        runs = [TokenRun([0] * (one + 1), [None] * (one + 1), FinishReason.RUNNING) for one in accepted]
        step = DecodeStep((), np.zeros(len(sizes), np.int64), np.zeros(0, np.int64), cast(Any, None), cast(Any, None))
        requests = self._requests if self._steady else [*self._requests]
        rows = cast(DecodeRows, SimpleNamespace(next_step=lambda: step, requests=requests, steps_left=1000))
        if drafted is None:
            self.alone += bool(self._speculation.step(rows, step))
        else:
            drafts = [np.zeros(size, np.int64) for size in drafted]
            self._speculation.settle(self._speculation.launch(rows, step, drafts), runs)
        for row, run in enumerate(runs):
            self._requests[row].output.extend(run.token_ids)
            if len(self._requests[row].output) >= self._length:
                self._speculation.forget(self._requests[row])
                self._requests[row] = self._request()
        return accepted

    def _accepted(self, request: DecodeRequest, drafted: int) -> int:
        probability = self._holds(request.sequence_id)
        return sum(1 for _ in itertools.takewhile(lambda _: self._draws.random() < probability, range(drafted)))

    def _request(self) -> DecodeRequest:
        return cast(DecodeRequest, Request(next(self._numbers), self._length, SimpleNamespace(max_tokens=self._length)))


def speculation_of(most: int, max_step_tokens: int, *, follows: bool = False, computes: bool = False) -> Speculation:
    """follows: the device looks drafts up, so that a verify step costs less. computes: the drafter is a model."""
    engine = SimpleNamespace(
        launch=lambda step: Launched(cast(Any, step.alone)),
        take_back=lambda surplus, is_last: None,
        capabilities=Capabilities(True, computes, 1 << 20 if follows else 0, follows and not computes),
    )
    return Speculation(Zeros(computes=computes), cast(Engine, engine), most, max_step_tokens, Counters())
