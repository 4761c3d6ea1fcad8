"""The forwards that an engine captures before its first request."""

from typing import NamedTuple

from tandem.workers.config import Role, WorkerConfig


class Captures(NamedTuple):
    """Forwards that CUDA graphs compute from now on, where device, kernels and model can. 0 captures none of a kind."""

    steps: int = 0  # rows; see ModelRunner.capture_steps
    prompts: int = 0  # tokens; see ModelRunner.capture_prompts
    verified: int = 0  # tokens; see ModelRunner.capture_verification
    max_ngram: int = 0  # of drafts that the device looks up behind verify steps
    draft_tokens: int = 0  # most of a draft; see ModelRunner.capture_drafts
    joint: bool = False  # see ModelRunner.capture_steps_with_prompts
    warm_up: bool = False  # see ModelRunner.warm_up; it comes first


FIRST_USE = Captures(warm_up=True)


def captures_of(config: WorkerConfig) -> Captures:
    """Returns the captures that a worker needs in its role, or in all roles that it may take."""
    decodes, prefills = (config.adaptive or config.role == role for role in (Role.DECODE, Role.PREFILL))
    speculation = config.speculation
    drafts = bool(decodes and speculation.tokens)
    return Captures(
        steps=config.max_sequences if decodes else 0,
        prompts=config.max_batch_tokens if prefills else 0,
        verified=speculation.max_step_tokens if drafts else 0,
        max_ngram=speculation.max_ngram if drafts and speculation.method == "ngram" else 0,
        draft_tokens=speculation.tokens if drafts else 0,
        joint=config.adaptive,
    )
