"""Prompts that this worker computes for sequences which it decodes, too."""

import time
from typing import Protocol

from tandem.workers.errors import WorkerError
from tandem.workers.requests.decode_request import DecodeRequest, LocalPrompt
from tandem.workers.requests.first_token import FirstToken
from tandem.workers.requests.token_stream import Prefilled
from tandem.workers.sampling.sampling_params import SamplingParams


class PromptQueue(Protocol):
    """What computes prompts; see Prefills."""

    def add(self, prompt: LocalPrompt) -> None: ...

    def withdraw(self, prompt: LocalPrompt) -> None: ...


class Begun(Protocol):
    """Hears how prompts end."""

    def begun(self, request: DecodeRequest, first: FirstToken, prefilled: Prefilled) -> None: ...

    def failed(self, request: DecodeRequest, error: WorkerError) -> None: ...


class LocalPrompts:
    """A Destination: their requests, from StartGenerate to the first token. Owned by the step thread."""

    def __init__(self, queue: PromptQueue, decodes: Begun) -> None:
        self._queue = queue
        self._decodes = decodes
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
        prompt.host_cached_tokens = request.host_cached_tokens
        prompt.begin_output()
        self._prompts[request.request_id] = prompt
        self._queue.add(prompt)

    def withdraw(self, request: DecodeRequest) -> bool:
        """No more is computed, and the sequence goes; False when no prompt of the request is under way."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            return False
        self._queue.withdraw(prompt)
        return True

    def post(self, prompt: LocalPrompt, row: int) -> None:
        """No peer awaits it."""

    def finish(self, prompt: LocalPrompt, first: FirstToken) -> None:
        """See Destination."""
        del self._prompts[prompt.request_id]
        seconds = time.perf_counter() - prompt.started
        began_ns = time.time_ns() - int(seconds * 1e9)
        queued = prompt.started - prompt.arrived
        prefilled = Prefilled(prompt.cached_tokens, queued, seconds, began_ns, prompt.host_cached_tokens)
        self._decodes.begun(prompt.request, first, prefilled)

    def fail(self, prompt: LocalPrompt, error: WorkerError) -> None:
        """See Destination. Its request ends, which withdraws the prompt."""
        self._decodes.failed(prompt.request, error)
