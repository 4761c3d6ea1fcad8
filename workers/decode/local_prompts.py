"""Prompts that this worker computes for sequences which it decodes, too."""

import time
from typing import Protocol

from tandem.cache.plan.errors import OutOfPages
from tandem.workers.errors import ForwardFailed, WorkerError
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.requests.decode_request import DecodeRequest, LocalPrompt
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.requests.token_stream import Prefilled, TokenFanout, TokenUpdate
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams


class PromptQueue(Protocol):
    """The queue of prompts that this worker computes; see Prefills."""

    def add(self, prompt: LocalPrompt) -> None: ...

    def withdraw(self, prompt: LocalPrompt) -> None: ...


class Begun(Protocol):
    """Hears how prompts end."""

    def begun(self, request: DecodeRequest) -> None: ...

    def whole(self, request: DecodeRequest) -> None: ...

    def failed(self, request: DecodeRequest, error: WorkerError) -> None: ...


class LocalPrompts:
    """A Destination: their requests, from StartGenerate to the first token. Owned by the step thread."""

    def __init__(self, queue: PromptQueue, decodes: Begun, reservations: Reservations, fanout: TokenFanout) -> None:
        self._queue = queue
        self._decodes = decodes
        self._reservations = reservations
        self._fanout = fanout
        self._prompts: dict[str, LocalPrompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def start(self, request: DecodeRequest, params: SamplingParams) -> None:
        """Queues the prompt; what the reservation found in the prefix index is not computed again."""
        prompt = LocalPrompt(
            request.request_id,
            request.sequence_id,
            request.prompt,
            params,
            request,
            destination=self,
            constraint=request.constraint,
            gatherer=request.gatherer,
        )
        prompt.computed = prompt.cached_tokens = len(request.prompt) - request.expected_tokens
        prompt.host_cached_tokens, prompt.disk_cached_tokens = request.host_cached_tokens, request.disk_cached_tokens
        prompt.begin_output()
        self._prompts[request.request_id] = prompt
        self._queue.add(prompt)

    def withdraw(self, request: DecodeRequest) -> bool:
        """Stops computing, and removes the sequence. False if no prompt of the request is under way."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False
        self._queue.withdraw(prompt)
        return True

    def post(self, prompt: LocalPrompt, row: int) -> None:
        """Does nothing: no peer awaits the token."""

    def finish(self, prompt: LocalPrompt, first: FirstToken) -> None:
        """See Destination."""
        del self._prompts[prompt.request_id]
        seconds = time.perf_counter() - prompt.started
        began_ns = time.time_ns() - int(seconds * 1e9)
        queued = prompt.started - prompt.arrived
        stored = prompt.host_cached_tokens, prompt.disk_cached_tokens
        prefilled = Prefilled(prompt.cached_tokens, queued, seconds, began_ns, *stored)
        self._begin(prompt.request, first, prefilled)

    def _begin(self, request: DecodeRequest, first: FirstToken, prefilled: Prefilled) -> None:
        """Sends the request's first token."""
        assert request.rule is not None
        assert request.token_stream is not None
        request.begin(first.token_id)
        reason = request.rule.reason(first.token_id, 1)
        run = TokenRun((first.token_id,), (first.logprobs,), reason)
        if reason == FinishReason.RUNNING:
            try:
                self._reservations.narrow(request)
            except OutOfPages as error:
                reason = f"no room to decode {request.request_id!r}: {error}"
                self._decodes.failed(request, ForwardFailed(reason))
                return
            self._decodes.begun(request)
        else:
            self._decodes.whole(request)
        self._fanout.publish([TokenUpdate(request.token_stream, run, prefilled)])

    def fail(self, prompt: LocalPrompt, error: WorkerError) -> None:
        """See Destination. Its request ends, which withdraws the prompt."""
        self._decodes.failed(prompt.request, error)
