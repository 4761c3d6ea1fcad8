"""Log-probabilities of prompts on their way from the step thread to the calls that wait for them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager

from tandem.proto import worker_pb2
from tandem.workers.errors import InvalidCall
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, PromptLogprobs
from tandem.workers.sampling.sampling_params import SamplingParams


class PromptLogprobStream:
    """The stream of one request's prompt log-probabilities. Owned by the event loop; deliver() is called on the step
    thread."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._pieces: deque[PackedLogprobs] = deque()
        self._ended = False
        self._ready = asyncio.Event()

    def deliver(self, pieces: Sequence[PackedLogprobs]) -> None:
        """Delivers all pieces that there are."""
        self._event_loop.call_soon_threadsafe(self._finish, pieces)

    def end(self) -> None:
        """Ends the stream. Idempotent."""
        self._ended = True
        self._ready.set()

    async def messages(self) -> AsyncGenerator[worker_pb2.PackedLogprobs]:
        """Yields messages, each made when the previous one is written."""
        await self._ready.wait()
        while self._pieces:
            piece = self._pieces.popleft()
            yield worker_pb2.PackedLogprobs(
                logprobs=piece.logprobs.astype("<f4", copy=False).tobytes(),
                top_ids=piece.top_ids.astype("<u4", copy=False).tobytes(),
                top_logprobs=piece.top_logprobs.astype("<f4", copy=False).tobytes(),
            )

    def _finish(self, pieces: Sequence[PackedLogprobs]) -> None:
        if not self._ended:
            self._pieces.extend(pieces)
            self.end()


class PromptLogprobStreams:
    """The open ones, by request id. Each lives as long as the call that reads it. Owned by the event loop."""

    def __init__(self) -> None:
        self._open: dict[str, PromptLogprobStream] = {}

    @contextmanager
    def opened(self, request_id: str) -> Generator[PromptLogprobStream | None]:
        """Opens a stream; None where it is open already."""
        if request_id in self._open:
            yield None
            return
        stream = self._open[request_id] = PromptLogprobStream(asyncio.get_running_loop())
        try:
            yield stream
        finally:
            del self._open[request_id]

    @contextmanager
    def filled(self, request_id: str, *, wanted: bool) -> Generator[PromptLogprobStream | None]:
        """Gives the stream of a request whose call has come; it ends with the call. None where nobody reads."""
        stream = self._open.get(request_id) if wanted else None
        try:
            yield stream
        finally:
            if stream is not None:
                stream.end()


def gatherer(stream: PromptLogprobStream | None, params: SamplingParams) -> PromptLogprobs | None:
    """Returns what a prompt's forwards fill. None for a request that does not ask; InvalidCall where nobody reads."""
    if params.prompt_logprobs is None:
        return None
    if stream is None:
        raise InvalidCall("sampling.prompt_logprobs is set; a call of PromptLogprobs must be open for the request")
    return PromptLogprobs(params.prompt_logprobs, stream.deliver)
