"""One prompt on its way through this worker's forwards, wherever its KV goes."""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.workers.errors import WorkerError
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.post import Post
from tandem.workers.requests.reader import Reader
from tandem.workers.sampling.finish import FinishRule
from tandem.workers.sampling.guided import Constraint
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.prompt_logits import PromptLogits
from tandem.workers.sampling.prompt_logprobs import PromptLogprobs
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec

OfKind = TypeVar("OfKind", contravariant=True)


class Destination(Protocol[OfKind]):
    """The destination of prompts of one kind: a peer decodes them, or this worker itself does.

    A prompt that leaves its forwards ends in finish() or in fail(), unless its destination has withdrawn it.
    """

    def post(self, prompt: OfKind, row: int, /) -> Post | None:
        """Whom the first token is to be posted to, which is sampled as this row; None: to nobody."""
        ...

    def finish(self, prompt: OfKind, first: FirstToken, /) -> None:
        """Called when the host has the first token."""
        ...

    def fail(self, prompt: OfKind, error: WorkerError, /) -> None:
        """Called when a forward of the prompt has failed."""
        ...


@dataclass(eq=False)
class Prompt:
    """Owned by the step thread."""

    request_id: str
    sequence_id: int
    spec: PromptSpec
    params: SamplingParams
    destination: Destination[Any] = field(kw_only=True, repr=False)
    constraint: Constraint | None = field(default=None, kw_only=True)  # its place in the grammar of params.guided
    gatherer: PromptLogprobs | None = field(default=None, kw_only=True)  # where the request asks for them
    reader: Reader | None = field(default=None, kw_only=True)  # where nobody decodes it
    computed: int = field(default=0, kw_only=True)  # positions stored once the forwards launched so far are done
    cached_tokens: int = field(default=0, kw_only=True)  # found in the prefix index
    host_cached_tokens: int = field(default=0, kw_only=True)  # of these, copied back from host memory
    disk_cached_tokens: int = field(default=0, kw_only=True)  # of these, read from a disk before
    arriving: bool = field(default=False, kw_only=True)  # pages that it begins with are yet to come from host memory
    logits: PromptLogits | None = field(default=None, kw_only=True)  # where all was launched speculatively
    left: bool = field(default=False, kw_only=True)  # no forward has it any more, and nobody wants its first token
    arrived: float = field(default_factory=time.perf_counter, kw_only=True)
    deadline: float = field(init=False)  # of its first token, in the time of `arrived`; infinite without a target
    started: float = field(default=0.0, kw_only=True)
    sampled_at: float = field(default=0.0, kw_only=True)  # when the host learned the first token
    marked: bool = field(default=False, kw_only=True)  # whether the cache knows where the KV goes
    push_seconds: float = field(default=0.0, kw_only=True)
    bytes_pushed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        left = self.params.first_token_seconds  # of the target, when the worker heard of it
        self.deadline = math.inf if left is None else self.arrived + left

    @property
    def token_ids(self) -> Int64Array:
        return self.spec.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.spec)

    @property
    def least_chunk(self) -> int:
        """The least that its next forward computes: an encoder's prompt as a whole."""
        return max(self.spec.encoder.border - self.computed, 1)

    @property
    def matches(self) -> bool:
        """Whether it may begin with a prefix that is not computed."""
        return self.gatherer is None and (self.reader is None or self.reader.needs_last_only)

    @property
    def shares(self) -> bool:
        """Whether others may find it in the prefix index."""
        return True

    def logit_rules(self, eos_token_ids: tuple[int, ...]) -> LogitRules | None:
        """Returns the rules for the prompt's first token; None for a request without rules."""
        if not self.params.changes_logits:
            return None
        stop_ids = FinishRule.of(self.params, eos_token_ids).stop_ids
        # The encoder's tokens are nothing that the decoder has said.
        context = self.token_ids[self.spec.encoder.border :]
        guided = self.constraint is not None
        return LogitRules(self.params, stop_ids, context, self.spec.num_output, self.num_tokens, guided)

    def begin_output(self) -> None:
        """Starts the first token's mask, to be computed while the prompt is."""
        if self.constraint is not None:
            self.constraint.follow(self.token_ids[self.num_tokens - self.spec.num_output :].tolist())

    @property
    def target(self) -> tuple[int, PositionMap, int] | None:
        """The first position to send, the map of its destination, and the PE; None: the KV stays here."""
        return None

    @property
    def has_room(self) -> bool:
        """Whether its sequence is there, with pages for the whole prompt."""
        raise NotImplementedError
