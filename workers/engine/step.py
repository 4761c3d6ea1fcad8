"""The input of one launch, and what it leaves behind. Both are NamedTuples, as in scheduling.batch."""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.pending_samples import PendingSamples
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, Scored
from tandem.workers.scheduling.batch import DecodeStep


class DraftsFailed(RuntimeError):
    """A model's drafts could not be launched. Nothing else was launched."""


class StepDrafts(NamedTuple):
    """Makes a step of n rows verify drafts: row i has the inputs tokens[i]; see ModelRunner.verify.

    follows: the verify step before, of the same rows, is not read yet. The device has the tokens; here they are zeros.
    sizes: of a step that follows, int64 [n]: tokens that a model drafts for each row before; None: they are looked up.
    contexts: of a step that follows, see NextDrafts.remember; empty where the device has them.
    """

    tokens: Sequence[Int64Array]
    follows: bool = False
    sizes: Int64Array | None = None
    contexts: Sequence[Int64Array] = ()


class Step(NamedTuple):
    """Rows, prompt chunks, or both in one forward, with which nothing is pushed; see Engine.takes."""

    rows: DecodeStep | None = None
    drafts: StepDrafts | None = None  # of the rows
    chunks: PromptChunks | None = None
    scored: Sequence[Scored | None] = ()  # of each chunk, without rows; empty: nothing is scored
    push: bool = False  # whether what is marked to be sent goes along with the chunks
    alone: bool = False  # see ModelRunner.step
    foreseen: bool = False  # the rows are those of prepare(), now with tokens: launched only if that saves time


class Launched(NamedTuple):
    """rows: tokens behind the rows; None also where a step that is foreseen or follows was not launched. drafts: a
    model's drafts before the rows. prompts: see ModelRunner.prompts. scored: of each chunk that is scored."""

    rows: PendingSamples | None = None
    drafts: PendingSamples | None = None
    prompts: PromptLogits | None = None
    scored: Sequence[PackedLogprobs] = ()
