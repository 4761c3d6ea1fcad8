"""Decides what each step computes. Pure: it touches no device, no cache and no clock."""

from collections import deque
from collections.abc import Callable, Iterator

from tandem.workers.requests.prompt import Prompt
from tandem.workers.scheduling.batch import Chunk, StepBatch
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.scheduling.token_pace import TokenPace

LEAST_PROMPT_TOKENS = 1  # of each step with prompts, however many decode rows there are


class Scheduler:
    """Prompts in the order in which they came, and a row for each sequence that is decoded. Owned by the step thread.

    A worker's role is what its scheduler is given: prompts, decode rows, or both. Whether a prompt is for a peer or for
    a row of this worker makes no difference here.

        add() ──► waiting ── admitted() ──► running ── next_batch() ──► chunks, until remove()
        rows.join() ──────────────────────► rows ───── next_batch() ──► decodes, until rows.leave()
    """

    def __init__(self, max_batch_tokens: int, token_seconds: float | None = None) -> None:
        """max_batch_tokens: of a batch. Decode rows come first, one token each; prompts share the rest. token_seconds:
        how long a row may wait for its next token because of prompts; see TokenPace."""
        self.rows = DecodeRows()
        self.pace = TokenPace(token_seconds, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Prompt] = deque()
        self._running: list[Prompt] = []
        self._asked_in_vain: Prompt | None = None

    def add(self, request: Prompt) -> None:
        """Queues a prompt. One that has its room runs at once."""
        if request.has_room:
            self._running.append(request)
        else:
            self._waiting.append(request)

    def admitted(self, has_room: Callable[[Prompt], bool]) -> Iterator[Prompt]:
        """Waiting prompts that run from now on, in order, until one has no room.

        The caller takes the room of each prompt before it asks for the next.
        """
        while self._waiting and has_room(self._waiting[0]):
            request = self._waiting.popleft()
            self._running.append(request)
            yield request
        self._asked_in_vain = self._waiting[0] if self._waiting else None

    @property
    def lacks_room(self) -> bool:
        """Whether the first waiting prompt has found none: what becomes free is for it."""
        return self._asked_in_vain is not None and self._asked_in_vain in self._waiting

    def is_waiting(self, request: Prompt) -> bool:
        return request in self._waiting

    def is_running(self, request: Prompt) -> bool:
        return request in self._running

    def remove(self, request: Prompt) -> None:
        """No batch has this prompt any more. Idempotent."""
        for prompts in (self._waiting, self._running):
            if request in prompts:
                prompts.remove(request)

    @property
    def num_waiting(self) -> int:
        """Prompts without room."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts with room."""
        return len(self._running)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts: those that are not yet computed."""
        return sum(request.num_tokens - request.computed for request in (*self._waiting, *self._running))

    def next_batch(self, *, prompts: bool = True) -> StepBatch:
        """What the next step computes; calling it again without a change in between gives the same.

        prompts: whether the device has room for chunks behind those that were launched.
        """
        decodes = self.rows.next_step()
        if not self._running or not prompts:
            return StepBatch(decodes=decodes)
        launched = tuple(request for request in self._running if request.computed == request.num_tokens)
        alone = len(self._running) - len(launched) == 1 and not self._waiting
        return StepBatch(self._chunks(), launched, alone, decodes)

    def _chunks(self) -> tuple[Chunk, ...]:
        budget, chunks = self._max_batch_tokens, []
        if len(self.rows):
            budget = max(min(budget - len(self.rows), self.pace.chunk_tokens), LEAST_PROMPT_TOKENS)
        for request in self._running:
            length = min(budget, request.num_tokens - request.computed)
            if length < request.least_chunk and not chunks:  # an encoder's prompt waits for no larger budget
                length = min(request.least_chunk, request.num_tokens - request.computed)
            if length >= request.least_chunk:
                chunks.append(Chunk(request, length))
                budget = max(budget - length, 0)
        return tuple(chunks)
