"""Sampling parameters as arrays: what a step hands to the sampler without a loop over its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.sampling_params import ROW, SamplingParams

GREEDY_BELOW = 1e-5  # temperature, as in vLLM
NO_LOGPROBS = -1


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Parameters of n rows."""

    seeds: NDArray[np.uint64]  # [n]
    columns: Int64Array  # [parameters of ROW, n], of float64 the bits
    num_logprobs: Int64Array  # [n], NO_LOGPROBS reports none
    rules: NDArray[np.object_] | None = None  # LogitRules, or None, of each row; None where no row has any

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], rules: Sequence[LogitRules | None] = ()) -> "SampleBatch":
        """rules: one a row, or none at all.

        ValueError when a row that is not greedy has no seed: the gateway draws one.
        """
        for row, one in enumerate(params):
            if one.seed is None and one.temperature >= GREEDY_BELOW:
                raise ValueError(f"seed of row {row} is None; it must be drawn before the request reaches a worker")
        columns = np.empty((len(ROW), len(params)), np.int64)
        for column, (name, kind) in zip(columns, ROW.items(), strict=True):
            column[:] = np.fromiter(map(attrgetter(name), params), kind, len(params)).view(np.int64)
        return cls(
            seeds=np.array([one.seed or 0 for one in params], np.uint64),
            columns=columns,
            num_logprobs=np.array([NO_LOGPROBS if one.logprobs is None else one.logprobs for one in params], np.int64),
            rules=_rules(rules),
        )

    @property
    def size(self) -> int:
        return self.seeds.size

    def take(self, rows: NDArray[np.integer]) -> "SampleBatch":
        """Copies `rows` (int [m]), in that order."""
        rules = None if self.rules is None else _rules(self.rules[rows])
        return SampleBatch(self.seeds[rows], self.columns.take(rows, axis=1), self.num_logprobs[rows], rules)

    def join(self, other: "SampleBatch") -> "SampleBatch":
        """Returns these rows, then the other's."""
        both: list[LogitRules | None] = []
        if self.rules is not None or other.rules is not None:
            for batch in (self, other):
                both += [None] * batch.size if batch.rules is None else batch.rules.tolist()
        return SampleBatch(
            np.concatenate((self.seeds, other.seeds)),
            np.concatenate((self.columns, other.columns), axis=1),
            np.concatenate((self.num_logprobs, other.num_logprobs)),
            _rules(both),
        )

    @cached_property
    def is_guided(self) -> bool:
        """Whether rows follow grammars. Such a batch is sampled with masks, see masks_of()."""
        return self.rules is not None and any(one is not None and one.guided for one in self.rules)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether each row takes its best token."""
        temperature = self.columns[[*ROW].index("temperature")].view(np.float64)
        return bool((temperature.astype(np.float32) < GREEDY_BELOW).all())


def _rules(rules: Sequence[LogitRules | None] | NDArray[np.object_]) -> NDArray[np.object_] | None:
    if all(one is None for one in rules):
        return None
    array = np.empty(len(rules), np.object_)
    array[:] = rules
    return array
