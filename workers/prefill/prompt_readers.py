"""Prompts that nobody decodes: they are computed for an embedding, or for the logits of a few tokens."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np

from tandem.workers.config import LoopSettings
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import Aborted, InvalidCall, LogitsNotFinite, WorkerError
from tandem.workers.handoff.retired import IsPast, RetiredSequences
from tandem.workers.prefill.forwards import PromptForwards
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.prompt import Prompt
from tandem.workers.requests.reader import Reader, Wanted
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.sampling.pooling import Float32Array, Pooled, Reading
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.scheduling.batch import Chunk
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.prompt_spec import PromptSpec

POLL_SECONDS = 0.0001
PARAMS = SamplingParams(temperature=0)  # nothing is sampled by them


class ReadPrompts(NamedTuple):
    """The result of a call. values: [n, hidden], or [n, token_ids] where these are wanted. seconds: from the first
    forward until the last prompt was computed."""

    values: Float32Array
    cached_tokens: tuple[int, ...]
    host_cached_tokens: tuple[int, ...]
    disk_cached_tokens: tuple[int, ...]
    queue_seconds: float
    seconds: float


@dataclass(eq=False)
class ReadPrompt(Prompt):
    """One prompt of a call."""

    call: "ReadCall" = field(kw_only=True, repr=False)
    retired: bool = False  # its sequence has been given to RetiredSequences

    @property
    def has_room(self) -> bool:
        """False: the prompt waits for its pages."""
        return False


@dataclass(eq=False)
class ReadCall:
    """Prompts that came together. The first one that fails ends the call."""

    prompts: list[ReadPrompt] = field(default_factory=list)
    left: int = 0  # prompts that are not computed yet
    result: "Future[ReadPrompts]" = field(default_factory=Future)

    def complete(self) -> None:
        now, first = time.perf_counter(), min(prompt.started for prompt in self.prompts)
        readers = [prompt.reader for prompt in self.prompts if prompt.reader is not None]
        self.result.set_result(
            ReadPrompts(
                np.stack([reader.result for reader in readers]),
                tuple(prompt.cached_tokens for prompt in self.prompts),
                tuple(prompt.host_cached_tokens for prompt in self.prompts),
                tuple(prompt.disk_cached_tokens for prompt in self.prompts),
                first - self.prompts[0].arrived,
                now - first,
            )
        )


@dataclass(frozen=True, eq=False)
class _Launched:
    """A forward. ended: prompts that came to their end in it."""

    prompts: Sequence[ReadPrompt]
    readings: Sequence[Reading | None]  # of each prompt
    ended: Sequence[ReadPrompt]
    pooled: Pooled
    is_past: IsPast | None


class PromptReaders:
    """A Destination. Owned by the step thread.

    Prompts wait for room, and are computed chunk by chunk, as all others are. They have forwards of their own, in which
    nothing is pushed or sampled. Their pages are free after the last one, and stay in the prefix index.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        retired: RetiredSequences,
        ids: SequenceIds,
        forwards: PromptForwards,
        settings: LoopSettings,
    ) -> None:
        self._engine, self._scheduler, self._retired = engine, scheduler, retired
        self._ids, self._forwards = ids, forwards
        self._sharing, self._max_batch_tokens = settings.sharing, settings.max_batch_tokens
        self._launched: deque[_Launched] = deque()

    @property
    def num_pending(self) -> int:
        """The number of forwards whose values are not there yet."""
        return len(self._launched)

    def submit(self, request_id: str, prompts: Sequence[PromptSpec], wanted: Wanted) -> ReadCall:
        """Queues prompts. Raises InvalidCall where one never has room, or is not longer than what it skips."""
        for index, prompt in enumerate(prompts):
            shortage = self._engine.room(len(prompt), self._max_batch_tokens, prompt.encoder.length).shortage
            if shortage is not None:
                raise InvalidCall(f"prompts[{index}] needs {shortage[0]} pages; this worker has {shortage[1]}")
            if wanted.mean and wanted.skipped >= len(prompt):
                reason = f"it must be at most {len(prompt) - 1} of its {len(prompt)} tokens"
                raise InvalidCall(f"skipped is {wanted.skipped} for prompts[{index}]; {reason}")
        call = ReadCall(left=len(prompts))
        for spec in prompts:
            reader = Reader(wanted, len(spec))
            known = {"destination": self, "reader": reader, "call": call}
            prompt = ReadPrompt(request_id, self._ids.take(), spec, PARAMS, **known)
            call.prompts.append(prompt)
            self._scheduler.add(prompt)
        return call

    def withdraw(self, call: ReadCall, error: WorkerError | None = None) -> None:
        """Stops computing for a call. Its caller gets the error. Idempotent."""
        for prompt in call.prompts:
            if prompt.left:
                continue
            prompt.left = True
            self._scheduler.remove(prompt)
            self._retire(prompt)
        if not call.result.done():
            call.result.set_exception(error or Aborted("nobody waits for the prompts any more"))

    def launch(self, chunks: Sequence[Chunk], *, beside: bool) -> None:
        """Computes one chunk of each prompt. beside: as for Prefills.compute."""
        prompts = cast(list[ReadPrompt], [prompt for prompt, _ in chunks])
        pooled, readings = self._forwards.read_out(chunks)
        ended = [prompt for prompt in prompts if prompt.computed == prompt.num_tokens]
        if self._sharing:
            self._forwards.publish(chunks)
            for prompt in ended:
                self._engine.publish(prompt.sequence_id, prompt.token_ids, prompt.spec.salt)
        is_past = self._engine.mark()
        self._launched.append(_Launched(prompts, readings, ended, pooled, is_past))
        for prompt in ended:
            self._scheduler.remove(prompt)
            self._retire(prompt)
        while ended and not beside and is_past is not None and not is_past():  # as for first tokens
            time.sleep(POLL_SECONDS)

    def poll(self, fail: Callable[[Sequence[Prompt], Exception], None]) -> None:
        """Takes the values that have come. Waits for nothing. fail: hears of a forward that has failed."""
        while self._launched:
            launched = self._launched[0]
            try:
                if launched.is_past is not None and not launched.is_past():
                    return
            except Exception as error:
                self._launched.popleft()
                fail(launched.prompts, error)
                continue
            self._launched.popleft()
            self._take(launched)

    def post(self, prompt: ReadPrompt, row: int) -> None:
        """Posts nothing, because nobody awaits a token."""

    def finish(self, prompt: ReadPrompt, first: FirstToken) -> None:
        """Fails, because no token is sampled."""
        raise AssertionError("its forwards are read out")

    def fail(self, prompt: ReadPrompt, error: WorkerError) -> None:
        """See Destination. The prompt has left its forwards already."""
        self._retire(prompt)
        self.withdraw(prompt.call, error)

    def _retire(self, prompt: ReadPrompt) -> None:
        """Gives up the pages of a prompt that was admitted. Idempotent: launch() may fail before or after it."""
        if prompt.started and not prompt.retired:
            prompt.retired = True
            self._retired.add(prompt.sequence_id)

    def _take(self, launched: _Launched) -> None:
        hidden, logits = iter(launched.pooled.hidden), iter(launched.pooled.logits)
        for prompt, reading in zip(launched.prompts, launched.readings, strict=True):
            if reading is not None and prompt.reader is not None:
                prompt.reader.take(next(logits) if reading.token_ids else next(hidden))
        for prompt in launched.ended:
            if not prompt.left:
                self._end(prompt)

    def _end(self, prompt: ReadPrompt) -> None:
        assert prompt.reader is not None, "it was made with one"
        prompt.left = True
        if not np.isfinite(prompt.reader.result).all():
            self.withdraw(prompt.call, LogitsNotFinite(prompt.request_id, prompt.num_tokens))
            return
        prompt.call.left -= 1
        if not prompt.call.left:
            prompt.call.complete()
