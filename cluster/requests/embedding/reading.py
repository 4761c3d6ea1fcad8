"""Sends the prompts of one call to prefill workers, which compute them and decode nothing."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.cluster.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    ForwardFailed,
    LogitsNotFinite,
    PlacementLost,
    RequestRefused,
    WorkerCallError,
    WorkerFull,
    WorkerUnreachable,
)
from tandem.cluster.peers.table import GatewayTable
from tandem.cluster.requests.observer import RequestObserver
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.worker_link import WorkerLink, had_prompts
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.config import Role
from tandem.workers.wire.messages import prompt_to_proto
from tandem.workers.wire.prompt_spec import MOST_READ, PromptSpec

Values = NDArray[np.float32]
LOOK_SECONDS = 0.02  # between two looks for a worker with room, if no call of this process has ended
AHEAD = 3  # full forwards of these prompts per worker: it is never idle, and others wait no longer
UNSURE = (WorkerFull, WorkerUnreachable, RequestRefused)  # the worker may never have had the prompts
MOST_VALUES = 1 << 21  # numbers of one call's answer: messages have at most 16 MiB besides a prompt


@dataclass(frozen=True, eq=False)
class ReadingJob:
    """Prompts of one client, and what is read of each: see ReadPromptsRequest. width: numbers read of each prompt; the
    answer has the first `kept` of them."""

    request_id: str
    prompts: Sequence[PromptSpec]
    width: int
    kept: int
    mean: bool = False
    skipped: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def priority(self) -> int:
        return self.prompts[0].priority


@dataclass(frozen=True)
class ReadAnswer:
    """The answer. values: [prompts, kept], in the prompts' order."""

    values: Values
    usage: inference_pb2.Usage
    timings: inference_pb2.Timings


@dataclass(eq=False)
class _Group:
    """Neighbouring prompts that one call of a worker computes."""

    begin: int
    prompts: list[PromptSpec] = field(default_factory=list)
    tokens: int = 0


class PromptReading:
    """Sends prompts, some at a time, to the prefill worker with the least work. The prompts of a lost worker go to
    another. Owned by the gateway's event loop.

    Each worker has at most AHEAD forwards of these prompts, over all gateway processes. So prompts that are decoded
    wait for these at most, however many wait here. Clients take turns here.
    """

    def __init__(
        self,
        islands: Islands,
        queue: AdmissionQueue,
        *,
        id_prefix: str,
        processes: int,
        max_batch_tokens: int,
        max_attempts: int,
        queue_seconds: float,
    ) -> None:
        """queue: of this process. id_prefix: see Router. processes: number of the gateway's processes.
        max_batch_tokens: of a worker's forward."""
        self._islands, self._queue = islands, queue
        self._id_prefix, self._asked = id_prefix, itertools.count(1)
        self._max_batch_tokens, self._max_attempts = max_batch_tokens, max_attempts
        self._queue_seconds = queue_seconds
        self._most = max(max_batch_tokens, AHEAD * max_batch_tokens // processes)
        self._placed: Counter[WorkerLink] = Counter()  # tokens of this process's groups

    async def run(
        self, job: ReadingJob, client: str, deadline: float, observer: RequestObserver, had: dict[int, int]
    ) -> ReadAnswer:
        """deadline: in the event loop's time. had: gets the tokens that a worker had, see charged(). Cancelling this
        call ends what workers do for it.

        Raises Overloaded, DeadlineExceeded, AttemptsExhausted, ServerError, InvalidRequest.
        """
        call = _Call(job, client, deadline, observer, had)
        try:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as group:
                for part in self._groups(job):
                    place = await self._place(call, part, again=part.begin > 0)
                    call.left -= part.tokens
                    self._begin(group, self._read(call, part, place), place)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while its prompts were computed") from None
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            raise error.client_error(str(error)) if isinstance(error, WorkerCallError) else error from None
        return call.answer()

    @staticmethod
    def _begin(group: asyncio.TaskGroup, reading: Coroutine[Any, Any, None], place: "_Place") -> None:
        """Begins a group's call. A group in which a call has failed takes no more. A task may also be cancelled before
        it begins."""
        try:
            task = group.create_task(reading)
        except RuntimeError:
            reading.close()
            place.release()
            raise
        task.add_done_callback(place.release)

    def _groups(self, job: ReadingJob) -> Iterator[_Group]:
        group, most = _Group(0), min(MOST_READ, max(1, MOST_VALUES // max(1, job.width)))
        for index, prompt in enumerate(job.prompts):
            if group.prompts and (len(group.prompts) == most or group.tokens + len(prompt) > self._max_batch_tokens):
                yield group
                group = _Group(index)
            group.prompts.append(prompt)
            group.tokens += len(prompt)
        yield group

    async def _place(self, call: "_Call", part: _Group, *, again: bool) -> "_Place":
        """Waits for the call's turn, and for a worker with little work. The worker's load counts the group from then
        on."""
        job, queue = call.job, self._queue
        try:
            async with (
                asyncio.timeout(self._queue_seconds),
                queue.turn(call.client, max(call.left, part.tokens), admitted=again, priority=job.priority),
            ):
                while True:
                    await queue.first()
                    queue.room.clear()
                    link = self._choose(part.tokens)
                    if link is not None:
                        call.placed()
                        worker_id = f"{self._id_prefix}r{next(self._asked)}/{job.request_id}"
                        return _Place(link, worker_id, part.tokens, self._placed, queue)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(queue.room.wait(), LOOK_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no prefill worker had room for {part.tokens} prompt tokens within {self._queue_seconds:g} s "
                "(gateway.queue_seconds)"
            ) from None

    def _choose(self, tokens: int) -> WorkerLink | None:
        """Chooses the reachable prefill worker that has room and the fewest prompt tokens to compute, whosever they
        are. Chooses among all workers if no prefill worker is reachable."""
        links, loads = self._islands.links(), [one for one in self._islands.loads() if one.reachable]
        prefills = [one for one in loads if one.role == Role.PREFILL] or loads
        placed = self._placed
        free = [one for one in prefills if not (held := placed[links[one.key]]) or held + tokens <= self._most]
        best = min(free, key=lambda one: (one.prompt_tokens, one.load), default=None)
        return None if best is None else links[best.key]

    async def _read(self, call: "_Call", part: _Group, place: "_Place") -> None:
        """Reads a part from a worker. A failed forward counts as a loss once: another prompt may have been at fault."""
        reasons: list[str] = []
        failed = False
        while True:
            try:
                return await self._ask(call, part, place)
            except LogitsNotFinite:
                raise
            except (PlacementLost, WorkerFull) as lost:
                error: WorkerCallError = lost
            except ForwardFailed as failure:
                if failed:
                    raise
                failed, error = True, failure
            call.observer.lost(error)
            reasons.append(str(error))
            if len(reasons) >= self._max_attempts:
                raise AttemptsExhausted(
                    f"workers were lost in each of {len(reasons)} attempts (gateway.max_attempts); the last: {error}"
                )
            place = await self._place(call, part, again=True)
            call.timings.attempts += 1

    async def _ask(self, call: "_Call", part: _Group, place: "_Place") -> None:
        job, link = call.job, place.link
        request = worker_pb2.ReadPromptsRequest(
            request_id=place.worker_id,
            epoch=link.epoch,
            prompts=map(prompt_to_proto, part.prompts),
            mean=job.mean,
            skipped=job.skipped,
            token_ids=job.token_ids,
        )
        had = True
        try:
            seconds = call.deadline - asyncio.get_running_loop().time()
            call.take(part, await link.read_prompts(request, max(seconds, 0.001)))
        except UNSURE as error:
            had = had_prompts(error)
            raise
        finally:
            if had:
                call.had[part.begin] = part.tokens
            place.release()


class _Place:
    """A worker's share of the work: its load counts these tokens until release()."""

    def __init__(
        self, link: WorkerLink, worker_id: str, tokens: int, placed: Counter[WorkerLink], queue: AdmissionQueue
    ) -> None:
        """worker_id: the worker's id of the call. placed: counts the tokens, too. queue: hears of the room."""
        self.link, self.worker_id = link, worker_id
        self._tokens, self._placed, self._queue = tokens, placed, queue
        link.expect_prompt(worker_id, tokens)
        link.load += tokens
        placed[link] += tokens

    def release(self, *_: object) -> None:
        """Stops counting the tokens. Idempotent."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self.link.forget_prompt(self.worker_id)
            self.link.load -= tokens
            self._placed[self.link] -= tokens
            if not self._placed[self.link]:
                del self._placed[self.link]  # the answer may come from a worker that is gone
            self._queue.room.set()


class _Call:
    """One job under way."""

    def __init__(
        self, job: ReadingJob, client: str, deadline: float, observer: RequestObserver, had: dict[int, int]
    ) -> None:
        self.had = had
        self.job, self.client, self.deadline, self.observer = job, client, deadline, observer
        self.left = job.num_tokens  # of prompts that have no worker yet
        self.usage = inference_pb2.Usage(prompt_tokens=self.left)
        self.timings = inference_pb2.Timings()
        self._began = time.perf_counter()
        self._values = np.empty((len(job.prompts), job.kept), np.float32)

    def placed(self) -> None:
        """Tells the observer that the first worker has room."""
        if not self.timings.attempts:
            self.timings.attempts = 1
            self.timings.queue_seconds = time.perf_counter() - self._began

    def take(self, part: _Group, response: worker_pb2.ReadPromptsResponse) -> None:
        """Takes in a worker's answer."""
        values = np.frombuffer(response.values, "<f4").reshape(len(part.prompts), self.job.width)
        self._values[part.begin : part.begin + len(part.prompts)] = values[:, : self.job.kept]
        self.usage.cached_tokens += sum(response.cached_tokens)
        self.usage.host_cached_tokens += sum(response.host_cached_tokens)
        self.usage.disk_cached_tokens += sum(response.disk_cached_tokens)
        self.timings.prefill_seconds += response.seconds

    def answer(self) -> ReadAnswer:
        """Returns the answer, once all workers have answered."""
        self.timings.total_seconds = time.perf_counter() - self._began
        return ReadAnswer(self._values, self.usage, self.timings)


def queue_of_process(max_requests: int, max_tokens: int, priority_seconds: float) -> AdmissionQueue:
    """Makes a queue for this process's calls: they wait for prompts' turns, and not for decode workers' pages."""
    return AdmissionQueue(max_requests, max_tokens, GatewayTable.alone(), priority_seconds=priority_seconds)
