"""One sequence on the worker that decodes it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem.transfer.completion import Signal
from tandem.workers.requests.prompt import Prompt
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishRule
from tandem.workers.sampling.guided import Constraint
from tandem.workers.sampling.logit_rules import LogitRules
from tandem.workers.sampling.prompt_logprobs import PromptLogprobs
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.prompt_spec import PromptSpec


@dataclass(eq=False)
class DecodeRequest:
    """One sequence from its reservation to its last token. Owned by the step thread."""

    request_id: str
    sequence_id: int
    prompt: PromptSpec
    signal: Signal | None  # None: this worker computes the prompt itself
    expected_tokens: int  # positions that are not in the prefix index: the sender writes, or this worker computes them
    max_tokens: int  # output tokens that pages were reserved for
    params: SamplingParams | None = None
    rule: FinishRule | None = None
    token_stream: TokenStream | None = None
    received: bool = False  # no peer's write can come any more
    ended: bool = False  # a step launched before may still have a row for it, which is then ignored
    output: list[int] = field(default_factory=list)
    constraint: Constraint | None = None  # its place in the grammar of params.guided
    gatherer: PromptLogprobs | None = None  # of a local prompt
    host_cached_tokens: int = 0  # of those that are not expected: copied back from host memory
    disk_cached_tokens: int = 0  # of these, read from a disk before
    parked: bool = False  # its sequence is in host memory
    replaced: bool = False  # another request has its place among the worker's sequences, and it is not copied yet
    reserved: int = 0  # positions that its sequence has pages for
    level: int = field(init=False)  # those of a higher one give their room up to it

    def __post_init__(self) -> None:
        self.level = self.prompt.priority

    def begin(self, token: int) -> None:
        """Begins the output. All KV of the prompt and the first token are here."""
        self.output.append(token)
        if self.token_stream is not None:
            self.token_stream.began_ns = time.time_ns()

    def take(self, tokens: Sequence[int]) -> None:
        """Extends the output by tokens that were sampled for it."""
        self.output += tokens
        if self.constraint is not None:
            self.constraint.follow(tokens)

    @property
    def logit_rules(self) -> LogitRules | None:
        """The rules of the request's row after all tokens so far, made anew at each call; None for a request without
        rules."""
        assert self.params is not None
        assert self.rule is not None
        if not self.params.changes_logits:
            return None
        prompt = self.prompt
        context = np.concatenate((prompt.token_ids[prompt.encoder.border :], np.array(self.output, np.int64)))
        num_output = prompt.num_output + len(self.output)
        if self.constraint is not None:
            self.constraint.follow(context[context.size - num_output + self.constraint.consumed :].tolist())
        return LogitRules(
            self.params, self.rule.stop_ids, context, num_output, len(prompt), self.constraint is not None
        )

    @property
    def length(self) -> int:
        """The number of positions whose KV is stored once all tokens so far are on the host: all but the last one's."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def is_local(self) -> bool:
        """Whether this worker computes the prompt itself."""
        return self.signal is None


@dataclass(eq=False)
class LocalPrompt(Prompt):
    """A prompt that the worker decodes, too: its KV is computed into the very sequence that is decoded."""

    request: DecodeRequest

    @property
    def has_room(self) -> bool:
        """True: its reservation is for prompt and output."""
        return True

    @property
    def shares(self) -> bool:
        """Whether the request may share pages. Not if its sequence will slide: the window has to give pages back."""
        return self.spec.sliding is None
