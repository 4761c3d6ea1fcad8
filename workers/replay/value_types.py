"""Every type whose values may be recorded, and the entries of a record."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tandem.cache.operations.holdings import PageCounts
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.spans import Sliding
from tandem.transfer.completion import Signal
from tandem.transfer.recall import Recall
from tandem.workers.engine.admission import Admission
from tandem.workers.engine.captures import Captures
from tandem.workers.engine.step import Step, StepDrafts
from tandem.workers.replay.codec import ValueType
from tandem.workers.replay.pseudonyms import Pseudonyms, without_tokens, zeros
from tandem.workers.requests.post import DigestRange, Post
from tandem.workers.runner.encoder_prompts import PromptChunks
from tandem.workers.sampling.guided import Guided
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.pooling import Pooled, Reading
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, Scored
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams, SlidingWindow
from tandem.workers.sampling.thinking import Thinking
from tandem.workers.scheduling.batch import DecodeStep
from tandem.workers.wire.prompt_spec import EncoderPrompt, PromptSpec


class Pushed(NamedTuple):
    """The writes of an action to one PE: calls, positions in each group and layer, and a checksum of groups and
    slots."""

    pe: int
    writes: int
    positions: int
    slots: int


class ActionEntry(NamedTuple):
    """Written before the action is done. gone: the numbers of objects that have ended."""

    number: int
    gone: tuple[int, ...]
    name: str
    arguments: tuple[Any, ...]


class ResultEntry(NamedTuple):
    """The value that the action returned or the error that it raised, what it pushed, and the counts of pages after
    it."""

    value: Any
    raised: str
    pushed: tuple[Pushed, ...]
    pages: PageCounts


class TokensEntry(NamedTuple):
    """The tokens of a launch, once they were read. launch: the number of its samples."""

    launch: int
    token_ids: Int64Array


class EndEntry(NamedTuple):
    """The end of the record, and its reason."""

    reason: str


class Unnoted(NamedTuple):
    """A result that is not recorded: it may still be on its way from the device, or it has tokens."""


ENTRIES = (ActionEntry, ResultEntry, TokensEntry, EndEntry)
RANK_LOST = "a rank of the worker was lost"
"""Why a record ends within an action: that has no result, because a replay loses no rank."""
HANDLES = (PromptLogits,)
"""Types of results that name what the engine keeps."""
UNNOTED = (PackedLogprobs, Pooled)


def value_types(pseudonyms: Pseudonyms | None = None) -> list[ValueType]:
    """pseudonyms: of a record without prompts."""
    tokens, salt = (pseudonyms.tokens, pseudonyms.salt) if pseudonyms else (_itself, _itself)
    return [
        *map(ValueType, (*ENTRIES, Unnoted, Pushed, PageCounts)),
        *map(ValueType, (Admission, EncoderPrompt, SlidingWindow, PositionMap, SlotRuns, Sliding, Recall, Signal)),
        *map(ValueType, (Post, DigestRange)),
        ValueType(SampleBatch, shared=True),  # steps of the same rows have the same one
        ValueType(PromptSpec, secret={"token_ids": tokens, "salt": salt}),
        ValueType(PromptChunks, secret={"chunks": _all_zeros}),
        ValueType(Scored, secret={"targets": zeros}),
        ValueType(DecodeStep, secret={"tokens": zeros}),
        *map(ValueType, (Captures, Step, Reading)),
        ValueType(StepDrafts, secret={"tokens": _all_zeros, "contexts": _all_zeros}),
        *map(ValueType, (SamplingParams, Guided, Thinking)),
        ValueType(
            LogitRules,
            shared=True,
            secret={"params": without_tokens, "stop_ids": lambda _: frozenset(), "context": zeros},
        ),
    ]


def schema() -> list[list[str]]:
    """Returns the types and their fields, for a file's header."""
    return [[one.type.__name__, *one.fields] for one in value_types()]


def secret_arguments(pseudonyms: Pseudonyms) -> dict[str, Any]:
    """Returns replacements for the arguments of actions that have tokens, by `action.parameter`."""

    return {
        "publish.token_ids": pseudonyms.tokens,
        "publish.salt": pseudonyms.salt,
        "draft.tokens": zeros,
        "sample.masks": _allowing_all,
        "mask.masks": _allowing_all,
    }


SECRET_RESULTS = frozenset({"draft"})


def _all_zeros(arrays: Iterable[Int64Array]) -> list[Int64Array]:
    return [zeros(one) for one in arrays]


def _allowing_all(masks: Int32Array | None) -> Int32Array | None:
    return None if masks is None else np.full_like(masks, -1)


def _itself(value: Any) -> Any:
    return value
