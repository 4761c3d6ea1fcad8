"""Open-loop load: requests arrive when they are due, however many are under way."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.sessions import Message, Session, Sessions, Turn
from tandem.cluster.tools.bench.targets import Refused, Target
from tandem.cluster.tools.bench.timeline import Running, Timeline
from tandem.cluster.tools.bench.workload import Workload

TICK_SECONDS = 0.05

Tell = Callable[[int], bool]
"""Takes the number of measured requests that have missed the SLO so far. Returns whether the load goes on."""


@dataclass(frozen=True)
class Load:
    """One load. First `warm_up` sessions arrive, then `measured`, then up to `tail`, of which only some are measured.

    The tail keeps the server loaded while measured requests run. It ends with the last of these, and its running
    requests are cancelled. number: see Workload.sessions. rate: requests a second; None is the trace's own.
    max_concurrency: an arrival that finds so many requests under way fails at once. timeout: seconds of a request.
    drain: seconds from the last measured arrival until measured requests that still run have failed.
    """

    workload: Workload
    slo: Slo
    number: int
    rate: float | None
    warm_up: int
    measured: int
    tail: int
    burstiness: float = 1.0
    max_concurrency: int = 4096
    timeout: float = 600.0
    drain: float = 600.0


@dataclass(frozen=True)
class LoadPart:
    """Part `index` of `count` of a load, which begins at `begin` of time.perf_counter(): every count-th session."""

    load: Load
    index: int
    count: int
    begin: float


@dataclass(frozen=True)
class Window:
    """The figures of all requests while measured requests arrived: the rates that the server kept up.

    requests: that ended. seconds: its length.
    """

    requests: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class PartOutcome:
    """timelines: of the measured requests that have ended. overdue: how many others have missed the SLO: first tokens
    that were too late when the load was stopped, and turns of chats that did not begin.

    busy: cores that the process used meanwhile. most_concurrent: requests under way at once. stopped: whether the load
    ended early.
    """

    timelines: list[Timeline]
    window: Window
    overdue: int
    busy: float
    most_concurrent: int
    stopped: bool


@dataclass
class OpenLoop:
    """Sends a part of a load to a target. Used once, on one event loop."""

    part: LoadPart
    target: Target
    tell: Tell
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _running: set[int] = field(default_factory=set)
    _measured: dict[int, Running] = field(default_factory=dict)  # of those under way
    _ended: list[Timeline] = field(default_factory=list)
    _all: list[Running] = field(default_factory=list)  # warm-up and tail included
    _failure: BaseException | None = None
    _missed: int = 0
    _most_concurrent: int = 0

    async def run(self) -> PartOutcome:
        load, part = self.part.load, self.part
        sessions = load.workload.sessions(load.number)
        times = sessions.arrivals((load.warm_up, load.measured, load.tail), load.rate, load.burstiness)
        due = [part.begin + float(after) for after in times]
        measured = range(load.warm_up, min(load.warm_up + load.measured, len(due)))
        wanted = sessions.turns * sum(index in measured for index in range(part.index, len(due), part.count))
        first, last = due[load.warm_up - 1] if load.warm_up else part.begin, due[measured[-1]]

        await asyncio.sleep(part.begin - time.perf_counter() - TICK_SECONDS)
        began, used = time.perf_counter(), time.process_time()
        sender = asyncio.create_task(self._send(sessions, due, measured))
        goes_on = await self._watch(sender, wanted, last + load.drain)
        busy = (time.process_time() - used) / (time.perf_counter() - began)
        if goes_on:
            self._fail_unfinished()
        missed = wanted - len(self._ended) if goes_on else self._overdue()
        await self._cancel(sender)
        window = self._window(first, min(last, time.perf_counter()))
        return PartOutcome(self._ended, window, missed, busy, self._most_concurrent, stopped=not goes_on)

    async def _send(self, sessions: Sessions, due: Sequence[float], measured: range) -> None:
        for index in range(self.part.index, len(due), self.part.count):
            session = sessions.session(index)
            await asyncio.sleep(due[index] - time.perf_counter())
            task = asyncio.create_task(self._session(session, due[index], index in measured))
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # sent before the next prompt is made

    async def _watch(self, sender: asyncio.Task[None], wanted: int, until: float) -> bool:
        """Returns when the wanted requests have ended, when it is `until`, or when the load is stopped: then False."""
        goes_on = True
        while goes_on and len(self._ended) < wanted and time.perf_counter() < until:
            await asyncio.sleep(TICK_SECONDS)
            if sender.done():
                sender.result()
            if self._failure is not None:
                raise self._failure
            goes_on = self.tell(self._missed + self._overdue())
        return goes_on

    async def _session(self, session: Session, due: float, measured: bool) -> None:
        history: list[Message] = []
        for number, turn in enumerate(session):
            if number:
                due = time.perf_counter() + turn.pause
                await asyncio.sleep(turn.pause)
            said = sum(len(message.token_ids) for message in history)
            running = Running(
                turn.output_tokens, due, max(said - 1, 0) + turn.reusable, keeps_tokens=number + 1 < len(session)
            )
            history += turn.messages
            await self._request(history, running, measured)
            if running.error is not None:
                self._fail_rest(session[number + 1 :], measured)
                return
            history.append(Message("assistant", running.token_ids, "".join(running.text) or None))

    async def _request(self, history: Sequence[Message], running: Running, measured: bool) -> None:
        if len(self._running) >= self._most_at_once:
            running.error = f"more than --max-concurrency {self.part.load.max_concurrency} under way"
            self._end(running, measured)
            return
        key = id(running)
        self._running.add(key)
        self._all.append(running)
        self._most_concurrent = max(self._most_concurrent, len(self._running))
        if measured:
            self._measured[key] = running
        try:
            await self.target.stream(history, running, self.part.load.timeout)
            running.is_done = bool(running.arrivals)
            if not running.is_done:
                running.error = "no token came"
        except Refused as error:
            running.error = str(error)
        finally:
            self._running.discard(key)
        if self._measured.pop(key, None) is not None:
            self._end(running, measured)

    def _fail_rest(self, turns: Sequence[Turn], measured: bool) -> None:
        for turn in turns:
            running = Running(turn.output_tokens, time.perf_counter(), error="the turn before it failed")
            self._end(running, measured)

    def _end(self, running: Running, measured: bool) -> None:
        if not measured:
            return
        running.sent = running.sent or running.due
        timeline = Timeline.of(running)
        self._missed += not timeline.meets(self.part.load.slo)
        self._ended.append(timeline)

    def _fail_unfinished(self) -> None:
        for running in self._measured.values():
            running.error = f"not done {self.part.load.drain:g} s after the last arrival"
            self._end(running, True)
        self._measured.clear()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    async def _cancel(self, sender: asyncio.Task[None]) -> None:
        tasks = {sender, *self._tasks}
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def _window(self, begin: float, end: float) -> Window:
        ended = sum(running.is_done and begin <= running.arrivals[-1] < end for running in self._all)
        tokens = sum(running.tokens_within(begin, end) for running in self._all)
        return Window(ended, tokens, max(end - begin, 0.0))

    def _overdue(self) -> int:
        now = time.perf_counter()
        return sum(running.overdue(now, self.part.load.slo) for running in self._measured.values())

    @property
    def _most_at_once(self) -> int:
        return -(-self.part.load.max_concurrency // self.part.count)
