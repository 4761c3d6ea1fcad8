"""One forward for the decode rows and the prompt chunks of a batch: it reads the weights once."""

from tandem.workers.engine.engine import Engine
from tandem.workers.engine.step import Step
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.scheduling.batch import DecodeStep, StepBatch


class JointForward:
    """A prompt forward that launches a decode step, too. Used once, by the step thread.

    Where it fails, prompts and rows hear the same error. Where the prompts fail before it, the step is launched alone.
    """

    def __init__(self, engine: Engine, step: DecodeStep) -> None:
        self._engine = engine
        self._step = step
        self._pending: PendingSamples | None = None
        self._error: Exception | None = None

    def __call__(self, chunks: PromptChunks) -> PromptLogits:
        """See PromptForward."""
        try:
            launched = self._engine.launch(Step(self._step, chunks=chunks))
        except Exception as error:
            self._error = error
            raise
        self._pending = launched.rows
        assert launched.prompts is not None, "the step had chunks"
        return launched.prompts

    def samples(self) -> PendingSamples:
        """Returns the decode step's samples. Raises what the forward raised."""
        if self._error is not None:
            raise self._error
        if self._pending is None:
            self._pending = self._engine.launch(Step(self._step)).rows
        assert self._pending is not None, "the step has rows"
        return self._pending


def is_joint(engine: Engine, batch: StepBatch) -> bool:
    """Returns whether the batch has rows and chunks, and one forward can compute both."""
    if batch.decodes is None or not batch.chunks or any(one.gatherer or one.reader for one, _ in batch.chunks):
        return False
    adapters = [chunk.request.spec.adapter for chunk in batch.chunks]
    return engine.takes(len(batch.chunks), batch.prompt_tokens, batch.decodes.sequence_ids, adapters)
