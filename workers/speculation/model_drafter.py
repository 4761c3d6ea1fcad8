"""Drafts by a small model, whose layers follow the target's in the cache."""

from collections.abc import Sequence

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.engine.engine import Engine
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.speculation.drafter import DraftAsk


class ModelDrafter:
    """Asks the engine, which holds the model. It keeps no state of a sequence."""

    computes = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int64Array]:
        return self._engine.draft(
            [ask.sequence_id for ask in asks],
            np.array([ask.context[-1] for ask in asks]),
            np.array([ask.most for ask in asks]),
            SampleBatch.from_params([ask.params for ask in asks]),
            np.array([ask.context.size for ask in asks]),
        )

    def forget(self, sequence_id: int) -> None:
        """Does nothing: the cache frees the sequence."""
