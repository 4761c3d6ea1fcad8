"""Sampling parameters as arrays: what a step hands to the sampler without a loop over its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

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

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> "SampleBatch":
        """ValueError when a row that is not greedy has no seed: the gateway draws one."""
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
        )

    def take(self, rows: NDArray[np.integer]) -> "SampleBatch":
        """A copy of `rows` (int [m]), in that order."""
        return SampleBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: "SampleBatch") -> "SampleBatch":
        """These rows, then the other's."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return SampleBatch(*(np.concatenate(pair) for pair in pairs))
