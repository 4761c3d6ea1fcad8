"""Drafts by a small model, whose layers the cache holds behind the target's."""

from collections.abc import Sequence

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.speculation.drafter import DraftAsk


class ModelDrafter:
    """Asks the runner, which holds the model; keeps nothing of a sequence."""

    computes = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        drafts = self._runner.drafts
        assert drafts is not None, "the runner has no model that drafts"
        return drafts.draft(
            [ask.sequence_id for ask in asks],
            np.array([ask.context[-1] for ask in asks]),
            np.array([ask.most for ask in asks]),
            SampleBatch.from_params([ask.params for ask in asks]),
            np.array([ask.context.size for ask in asks]),
        )

    def forget(self, sequence_id: int) -> None:
        """The cache forgets it."""
