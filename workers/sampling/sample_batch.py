"""Sampling parameters as arrays: what a step hands to the sampler without a loop over its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # temperature, as in vLLM
NO_LOGPROBS = -1


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """Parameters of n rows, arrays [n]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]  # at most 0 takes all
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    num_logprobs: NDArray[np.int64]  # NO_LOGPROBS reports none
    rules: NDArray[np.object_] | None = None  # LogitRules, or None, of each row; None where no row has any

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], rules: Sequence[LogitRules | None] = ()) -> "SampleBatch":
        """rules: one a row, or none at all.

        ValueError when a row that is not greedy has no seed: the gateway draws one.
        """
        for row, one in enumerate(params):
            if one.seed is None and one.temperature >= GREEDY_BELOW:
                raise ValueError(f"seed of row {row} is None; it must be drawn before the request reaches a worker")
        return cls(
            temperature=np.array([one.temperature for one in params], np.float32),
            top_p=np.array([one.top_p for one in params], np.float32),
            top_k=np.array([one.top_k for one in params], np.int64),
            min_p=np.array([one.min_p for one in params], np.float32),
            seed=np.array([one.seed or 0 for one in params], np.uint64),
            num_logprobs=np.array([NO_LOGPROBS if one.logprobs is None else one.logprobs for one in params], np.int64),
            rules=_rules(rules),
        )

    def take(self, rows: NDArray[np.integer]) -> "SampleBatch":
        """A copy of `rows` (int [m]), in that order."""
        taken = {name: getattr(self, name)[rows] for name in ARRAYS}
        return SampleBatch(**taken, rules=None if self.rules is None else _rules(self.rules[rows]))

    def join(self, other: "SampleBatch") -> "SampleBatch":
        """These rows, then the other's."""
        joined = {name: np.concatenate((getattr(self, name), getattr(other, name))) for name in ARRAYS}
        both: list[LogitRules | None] = []
        if self.rules is not None or other.rules is not None:
            for batch in (self, other):
                both += [None] * batch.seed.size if batch.rules is None else batch.rules.tolist()
        return SampleBatch(**joined, rules=_rules(both))


ARRAYS = tuple(field.name for field in fields(SampleBatch) if field.name != "rules")


def _rules(rules: Sequence[LogitRules | None] | NDArray[np.object_]) -> NDArray[np.object_] | None:
    if all(one is None for one in rules):
        return None
    array = np.empty(len(rules), np.object_)
    array[:] = rules
    return array
