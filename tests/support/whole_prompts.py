"""Computes prompts whose first tokens nobody samples."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.runner.model_runner import ModelRunner


def compute_prompts(
    runner: ModelRunner,
    sequence_ids: Sequence[int],
    chunks: Sequence[Int64Array],
    lengths: Sequence[int],
    *,
    push: bool = False,
) -> Tensor:
    """Calls ModelRunner.prompts() with the best tokens. Returns the logits."""
    logits, left = runner.prompts(PromptChunks(sequence_ids, chunks, lengths), push=push)
    if left is not None:
        left.compute(logits.argmax(1))
    return logits
