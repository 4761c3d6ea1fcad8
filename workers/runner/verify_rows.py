"""The rows of a verify step's tokens."""

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import FOLLOWS
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.sample_batch import SampleBatch


class VerifyRows:
    """The T tokens of n sequences, one sequence after another; steps with equal drafts and rows use it again.

    offsets: int64 [T], tokens of the same sequence before each. rows: int64 [T], the sequence of each, 0 … n - 1.
    sampling: of each token. sources: int64 [T], all ON_HOST; followers: the sources of a step that follows, see
    DraftKernels.
    """

    def __init__(self, appends: Int64Array, sampling: SampleBatch) -> None:
        """appends: int64 [n], the tokens of each sequence. sampling: of n rows."""
        self._appends, self._of = appends, sampling
        self.rows = np.repeat(np.arange(appends.size), appends)
        self.offsets = np.arange(self.rows.size) - np.repeat(np.cumsum(appends) - appends, appends)
        self.sampling = sampling.take(self.rows)
        self.sources = np.full(self.rows.size, ON_HOST)
        self.followers = FOLLOWS - self.rows

    def are_of(self, appends: Int64Array, sampling: SampleBatch) -> bool:
        """Whether they would be the same for these."""
        return sampling is self._of and appends.tolist() == self._appends.tolist()
