"""Processes that generate a load together, so that none of them is what is measured.

A child, main(), gets lines of JSON: a part of a load with its target, or `stop`. It answers with lines: the number of
requests that missed the SLO so far, every quarter of a second, and at the end its outcome.
"""

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from tandem.cluster.errors import BenchmarkFailed
from tandem.cluster.tools.bench.load import Load, LoadPart, OpenLoop, PartOutcome, Tell, Window
from tandem.cluster.tools.bench.open_target import open_target
from tandem.cluster.tools.bench.targets import TargetSpec

AHEAD_SECONDS = 0.3  # from the order to the begin, in which children make their first prompts
TELL_SECONDS = 0.25
END_SECONDS = 10.0
MOST_LINE = 1 << 30  # bytes
STOP = b"stop\n"


@dataclass(frozen=True)
class Order:
    """The order for one child process."""

    part: LoadPart
    target: TargetSpec


@dataclass(frozen=True)
class Answer:
    """A line from a child. outcome: at the end."""

    missed: int
    outcome: PartOutcome | None = None


ORDER, ANSWER = TypeAdapter(Order), TypeAdapter(Answer)


def default_processes() -> int:
    """Returns the number of processes: one for each four cores, up to four."""
    return min(4, max(1, len(os.sched_getaffinity(0)) // 4))


class Generators:
    """`count` processes that last from load to load; a single one is this process itself. An async context."""

    def __init__(self, count: int, target: TargetSpec) -> None:
        self._count = count
        self._target = target
        self._children: list[asyncio.subprocess.Process] = []
        self._missed: list[int] = []

    async def run(self, load: Load, most_missed: int | None) -> PartOutcome:
        """Makes the load with all processes together. It stops as soon as more than `most_missed` requests miss the
        SLO.

        Raises BenchmarkFailed when a child ends, and ConfigError for a target that cannot be opened.
        """
        parts = [
            LoadPart(load, index, self._count, time.perf_counter() + AHEAD_SECONDS) for index in range(self._count)
        ]

        def goes_on(missed: int) -> bool:
            return most_missed is None or missed <= most_missed

        if self._count == 1:
            return await run_part(Order(parts[0], self._target), goes_on)
        self._missed = [0] * self._count
        asked = zip(self._children, parts, strict=True)
        return _together(await asyncio.gather(*(self._ask(child, part, goes_on) for child, part in asked)))

    async def _ask(self, child: asyncio.subprocess.Process, part: LoadPart, goes_on: Tell) -> PartOutcome:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(ORDER.dump_json(Order(part, self._target)) + b"\n")
        stopped = False
        while line := await child.stdout.readline():
            answer = ANSWER.validate_json(line)
            if answer.outcome is not None:
                return answer.outcome
            self._missed[part.index] = answer.missed
            if not stopped and not goes_on(sum(self._missed)):
                stopped = True
                child.stdin.write(STOP)
        raise BenchmarkFailed(f"a process of the load generator ended with exit code {await child.wait()}")

    async def __aenter__(self) -> Self:
        if self._count > 1:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-m", __name__)
            self._children = [
                await asyncio.create_subprocess_exec(
                    *command,
                    stdin=pipe,
                    stdout=pipe,
                    limit=MOST_LINE,
                    start_new_session=True,  # an interrupt of the command line is this process's to handle
                )
                for _ in range(self._count)
            ]
            await asyncio.gather(*(child.stdout.readline() for child in self._children if child.stdout))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        for child in self._children:
            try:
                await asyncio.wait_for(child.wait(), END_SECONDS if kind is None else 0.1)
            except TimeoutError:
                child.kill()
                await child.wait()


async def run_part(order: Order, tell: Tell) -> PartOutcome:
    """Runs a part of the load in this process. It opens as many files as the system lets it: each HTTP request takes
    one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with aclosing(open_target(order.target)) as target:
        return await OpenLoop(order.part, target, tell).run()


def _together(outcomes: Sequence[PartOutcome]) -> PartOutcome:
    """Joins the outcomes. busy is that of the busiest process; most_concurrent is an upper bound."""
    return PartOutcome(
        [timeline for outcome in outcomes for timeline in outcome.timelines],
        Window(
            sum(outcome.window.requests for outcome in outcomes),
            sum(outcome.window.tokens for outcome in outcomes),
            max(outcome.window.seconds for outcome in outcomes),
        ),
        sum(outcome.overdue for outcome in outcomes),
        max(outcome.busy for outcome in outcomes),
        sum(outcome.most_concurrent for outcome in outcomes),
        any(outcome.stopped for outcome in outcomes),
    )


async def _serve_parent() -> None:
    """Obeys the parent until the input ends. The parent sends the next order when it has the outcome of the last."""
    lines = asyncio.StreamReader(limit=MOST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _say(Answer(0))
    stopped, running = asyncio.Event(), None
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            if line == STOP:
                stopped.set()
                continue
            stopped = asyncio.Event()
            running = group.create_task(_obey(ORDER.validate_json(line), stopped))
        if running is not None:
            running.cancel()


async def _obey(order: Order, stopped: asyncio.Event) -> None:
    told = 0.0

    def tell(missed: int) -> bool:
        nonlocal told
        if time.perf_counter() >= told + TELL_SECONDS:
            told = time.perf_counter()
            _say(Answer(missed))
        return not stopped.is_set()

    outcome = await run_part(order, tell)
    _say(Answer(0, outcome))


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(ANSWER.dump_json(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    gc.freeze()  # what is imported stays: no collection looks at it again
    asyncio.run(_serve_parent())


if __name__ == "__main__":
    main()
