"""Launches the forwards of a step on a runner."""

from collections.abc import Callable

from torch import Tensor

from tandem.workers.engine.step import DraftsFailed, Launched, Step, StepDrafts
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.runner.step_inputs import StepInputs
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.scheduling.batch import DecodeStep


class Launches:
    """Owned by an Engine."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_prompts = 0  # launches with prompts so far

    def prompts(self, step: Step) -> Launched:
        """Launches a step without rows."""
        assert step.chunks is not None, "a step has rows or chunks"
        if not step.scored:
            logits, left = self._runner.prompts(step.chunks, push=step.push)
            return Launched(prompts=self._named(logits, None if left is None else left.compute))
        logits, scored = self._runner.scored_prompts(step.chunks, step.scored, push=step.push)
        return Launched(prompts=self._named(logits), scored=scored)

    def rows(self, rows: DecodeStep, step: Step) -> Launched:
        """Launches a step with rows. Raises DraftsFailed."""
        if step.chunks is not None:
            pending, logits = self._runner.step_with_prompts(rows.sequence_ids, StepInputs(*rows[1:]), step.chunks)
            return Launched(pending, None, self._named(logits))
        if step.drafts is not None:
            return self._drafts(rows, step.drafts)
        if step.foreseen:
            return Launched(self._runner.step_foreseen(rows.sequence_ids, rows.tokens))
        return Launched(self._runner.step(*rows, alone=step.alone))

    def _drafts(self, rows: DecodeStep, drafts: StepDrafts) -> Launched:
        runner, drafting = self._runner, None
        if drafts.sizes is not None:
            assert runner.drafts is not None, "capabilities are asked first"
            try:
                drafting = runner.drafts.draft_behind(rows.sequence_ids, drafts.sizes, rows.sampling)
            except Exception as error:
                raise DraftsFailed("drafts could not be launched") from error
            if drafting is None:
                return Launched()
        elif drafts.contexts:
            assert runner.next_drafts is not None, "capabilities are asked first"
            runner.next_drafts.remember(drafts.contexts)
        ids, tokens, sampling, positions = rows.sequence_ids, drafts.tokens, rows.sampling, rows.positions
        pending = runner.verify(ids, tokens, sampling, positions, follows=drafts.follows)
        return Launched(pending, drafting)

    def _named(self, logits: Tensor, left: Callable[[Tensor], None] | None = None) -> PromptLogits:
        self._num_prompts += 1
        return PromptLogits(self._num_prompts, logits, left)
