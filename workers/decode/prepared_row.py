"""The first step of a request that is alone: prepared while its KV is awaited, launched once its token is here."""

import numpy as np

from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import Step
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.runner.step_inputs import ON_HOST
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.scheduling.batch import DecodeStep


class PreparedRow:
    """Owned by the step thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: DecodeStep | None = None

    def prepare(self, request: DecodeRequest) -> None:
        """Prepares the step where steps overlap, unless the request has LogitRules, which change with its token."""
        params = request.params
        assert params is not None
        if self._engine.capabilities.overlaps and not params.changes_logits:
            sampling, first = SampleBatch.from_params([params]), np.array([len(request.prompt) + 1])
            self._rows = DecodeStep((request.sequence_id,), np.zeros(1, np.int64), np.full(1, ON_HOST), sampling, first)
            self._engine.prepare(self._rows)

    def launch(self, request: DecodeRequest) -> PendingSamples | None:
        """Launches the step, whose token is here. Returns None and does nothing if it is not prepared any more."""
        rows = self._rows
        if rows is None or rows.sequence_ids[0] != request.sequence_id:
            return None
        return self._engine.launch(Step(rows._replace(tokens=np.array(request.output)), foreseen=True)).rows

    def drop(self) -> None:
        """Drops the prepared step: other steps come first. Idempotent."""
        self._rows = None
