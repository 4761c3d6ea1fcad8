"""Decides what each step computes. Pure: it touches no device, no cache and no clock."""

from collections.abc import Callable, Iterator

from tandem.workers.requests.prompt import Prompt
from tandem.workers.scheduling.batch import Chunk, StepBatch
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.scheduling.prompt_order import PromptOrder
from tandem.workers.scheduling.step_time import FIRST_RATE
from tandem.workers.scheduling.token_pace import TokenPace

PASSED_SECONDS = 1.0  # how long prompts of adapters in slots pass one that waits for a slot
BESIDE_PART = 64  # beside a more urgent prompt, others get this part of max_batch_tokens
LEAST_PROMPT_TOKENS = 1  # of each step with prompts, however many decode rows there are


class Scheduler:
    """Prompts by their turns, and a row for each sequence that is decoded. Owned by the step thread. Turns follow
    arrival, unless prompts have priorities or a target for their first token; see PromptOrder.

    A worker's role follows from its scheduler's input: prompts, decode rows, or both. Whether a prompt is for a peer or
    for a row of this worker makes no difference here.

        add() ──► waiting ── admitted() ──► running ── next_batch() ──► chunks, until remove()
        rows.join() ──────────────────────► rows ───── next_batch() ──► decodes, until rows.leave()
    """

    def __init__(self, max_batch_tokens: int, pace: TokenPace | None = None, priority_seconds: float = 30.0) -> None:
        """max_batch_tokens: of a batch. Decode rows come first, one token each; prompts share the rest. pace: bounds
        chunks with rows; None: nothing does. priority_seconds: see PromptOrder."""
        self.rows = DecodeRows()
        self.pace = pace or TokenPace(None, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._order = PromptOrder(priority_seconds)
        self._waiting: dict[Prompt, None] = {}  # these two keep the order in which prompts came
        self._running: dict[Prompt, None] = {}
        self._asked_in_vain: Prompt | None = None
        self.keeps_room = False
        """Whether what becomes free is for a request of this worker, and for no waiting prompt."""

    def add(self, request: Prompt) -> None:
        """Queues a prompt. One that has its room runs at once."""
        self._order.add(request)
        if request.has_room:
            self._running[request] = None
        else:
            self._waiting[request] = None

    def order(self, now: float) -> None:
        """Gives prompts with targets their turns for admitted() and next_batch(), once a step. now: by
        time.perf_counter(), as deadlines are."""
        self._order.update(now, self._prompt_rate)

    def admitted(
        self,
        has_room: Callable[[Prompt], bool],
        has_slot: Callable[[Prompt], bool] = lambda prompt: True,
        now: float = 0.0,
    ) -> Iterator[Prompt]:
        """Waiting prompts that run from now on, by their turns, until one has no room.

        has_slot: asked first, about prompts with an adapter. Others pass a prompt whose adapter has no slot: prompts
        without an adapter always do, and those with one until the prompt has waited for PASSED_SECONDS. now: as in
        order().

        The caller takes the room of each prompt before it asks for the next.
        """
        self._asked_in_vain = None
        if self.keeps_room:
            return
        lacking: set[bytes] = set()
        passes = True
        for request in self._order.for_room(self._waiting):
            adapter = request.spec.adapter
            if adapter and (not passes or adapter in lacking or not has_slot(request)):
                lacking.add(adapter)
                passes = passes and now - request.arrived <= PASSED_SECONDS
                continue
            if not has_room(request):
                self._asked_in_vain = request
                return
            del self._waiting[request]
            self._running[request] = None
            yield request

    @property
    def lacks_room(self) -> bool:
        """Whether the waiting prompt whose turn it was has found none: what becomes free is for it."""
        return self._asked_in_vain is not None and self._asked_in_vain in self._waiting

    @property
    def is_idle(self) -> bool:
        """Whether nothing is or will be computed."""
        return not (self._waiting or self._running or len(self.rows) or self.keeps_room)

    def is_waiting(self, request: Prompt) -> bool:
        return request in self._waiting

    def is_running(self, request: Prompt) -> bool:
        return request in self._running

    def remove(self, request: Prompt) -> None:
        """Removes a prompt. No batch has it any more. Idempotent."""
        self._order.remove(request)
        self._waiting.pop(request, None)
        self._running.pop(request, None)

    @property
    def num_waiting(self) -> int:
        """The number of prompts without room."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """The number of prompts with room."""
        return len(self._running)

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens that are not yet computed, of all prompts."""
        return sum(request.num_tokens - request.computed for request in (*self._waiting, *self._running))

    @property
    def urgent_priority(self) -> int | None:
        """The lowest priority number of the prompts that the next steps compute; None without one."""
        computed = (one for one in self._running if one.computed < one.num_tokens and not one.arriving)
        return min((one.spec.priority for one in computed), default=None)

    def next_batch(self, *, prompts: bool = True) -> StepBatch:
        """Returns what the next step computes. Calling it again without a change in between gives the same.

        prompts: whether the device has room for chunks after those that were launched.
        """
        decodes = self.rows.next_step()
        if not self._running or not prompts:
            return StepBatch(decodes=decodes)
        launched = tuple(request for request in self._running if request.computed == request.num_tokens)
        alone = len(self._running) - len(launched) == 1 and not self._waiting
        chunks = self._chunks()
        self._order.gave(chunks)
        return StepBatch(chunks, launched, alone, decodes)

    def _prompt_rate(self) -> float:
        """Prompt tokens a second, while rows are decoded."""
        return self.pace.prompt_rate(len(self.rows), self.rows.positions) or FIRST_RATE

    def _chunks(self) -> tuple[Chunk, ...]:
        rows, chunks = len(self.rows), list[Chunk]()
        # Rows' steps would wait for the pages of a prompt that are arriving.
        turns = (one for one in self._order.for_chunks(self._running) if not (rows and one.arriving))
        most, used = dict[int, int](), 0
        beside = max(self._max_batch_tokens // BESIDE_PART, LEAST_PROMPT_TOKENS)
        first: int | None = None  # the lowest priority of a chunk
        for request in turns:
            priority = request.spec.priority
            if priority not in most:
                most[priority] = self._most_tokens(request)
            budget, follows = most[priority] - used, first is not None and first < priority
            if follows and request.arriving:  # the more urgent one would wait for its pages
                continue
            if follows:
                budget = min(budget, beside)
            if budget <= 0 and chunks:
                break
            length = min(budget, request.num_tokens - request.computed)
            if length < request.least_chunk and not chunks:  # an encoder's prompt waits for no larger budget
                length = min(request.least_chunk, request.num_tokens - request.computed)
            if length >= request.least_chunk:
                chunks.append(Chunk(request, length))
                first = priority if first is None else min(first, priority)
                used += length
                beside -= length * follows
        return tuple(chunks)

    def _most_tokens(self, request: Prompt) -> int:
        """Returns the most prompt tokens of a step up to this prompt. The pace bounds them if a row has its priority or
        a lower number; other rows wait as long as it takes."""
        if not (rows := len(self.rows)):
            return self._max_batch_tokens
        most = self._max_batch_tokens - rows
        if self.rows.has_priority(request.spec.priority):
            chunk = self.pace.chunk_tokens(rows, self.rows.positions, request.computed, self.rows.drafted)
            most = min(most, chunk)
        return max(most, LEAST_PROMPT_TOKENS)
