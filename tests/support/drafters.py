"""Drafters for tests, and workers that have them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers import worker
from tandem.workers.speculation.drafter import DraftAsk, Drafter

SPECULATING = {"speculation.method": "ngram", "speculation.tokens": 4}


class KnownDrafter:
    """Drafts the given outputs, each token right with a probability; a wrong token is a neighbour."""

    computes = False

    def __init__(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], right: float = 1.0) -> None:
        self._known = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        self._right = right
        self._draws = random.Random(5)
        self.forgotten: list[int] = []

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return [self._draft(ask.context.tolist(), ask.most) for ask in asks]

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)

    def _draft(self, context: list[int], most: int) -> Int64Array:
        for tokens in self._known:
            if tokens[: len(context)] == context:
                due = tokens[len(context) : len(context) + most]
                draft = [one if self._draws.random() < self._right else abs(one - 1) for one in due]
                return np.array(draft, np.int64)
        return np.zeros(0, np.int64)


class FailingDrafter:
    computes = False

    def __init__(self) -> None:
        self.asked = 0

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        self.asked += 1
        raise RuntimeError("no draft")

    def forget(self, sequence_id: int) -> None:
        pass


@contextmanager
def drafting(drafter: Drafter) -> Iterator[None]:
    """Makes speculating workers that begin to serve in this process meanwhile ask `drafter`."""
    with mock.patch.object(worker, "make_drafter", lambda settings, runner: drafter if settings.tokens else None):
        yield
