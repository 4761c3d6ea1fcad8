"""The reports of a worker to a router, over and over: the prefixes that it holds, and how busy it is."""

import asyncio

from tandem.cache.plan.prefix_chain import KEY_BYTES
from tandem.proto import worker_pb2
from tandem.workers.steps.step_loop import StepLoop

LEAST_SECONDS = 0.02  # between two reports
FIGURES_SECONDS = 0.1  # between two where only steps were taken
MOST_KEYS = 8192  # of one message: its reader has other work, too


class Reports:
    """The reports for one caller of Worker/Watch. Nothing is kept for it but where it stands in the log of prefixes."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._position: int | None = None
        self._stored_position: int | None = None
        self._figures = worker_pb2.WorkerReport()
        self._seen = self._marks()
        self._steps = 0

    def take(self) -> list[worker_pb2.WorkerReport]:
        """Returns what is new since the last call. Called on the step thread. The first call tells all; none is
        empty."""
        self._seen, self._steps = self._marks(), self._loop.meter.steps
        first = self._position is None
        changes = self._loop.engine.prefix_changes(self._position)
        stored = self._loop.engine.prefix_changes(self._stored_position, stored=True)
        self._position, self._stored_position = changes.position, stored.position
        figures = self._loop.figures()
        of_keys = (changes.added, changes.removed, stored.added, stored.removed)
        if not first and not any(keys.size for keys in of_keys) and figures == self._figures:
            return []
        self._figures = figures
        reports = []
        keys = [each.astype("<u8").tobytes() for each in of_keys]
        for begin in range(0, max(*map(len, keys), 1), stride := MOST_KEYS * KEY_BYTES):
            part = [each[begin : begin + stride] for each in keys]
            report = worker_pb2.WorkerReport(
                added=part[0], removed=part[1], stored_added=part[2], stored_removed=part[3]
            )
            report.whole, report.stored_whole = changes.whole and begin == 0, stored.whole and begin == 0
            report.MergeFrom(figures)
            reports.append(report)
        return reports

    async def due(self) -> None:
        """Returns when take() has something, or may have. Called on the event loop. Asks nothing of the step thread."""
        waited = 0.0
        while True:
            await asyncio.sleep(LEAST_SECONDS)
            waited += LEAST_SECONDS
            stepped = self._loop.meter.steps != self._steps
            if self._marks() != self._seen or (stepped and waited >= FIGURES_SECONDS):
                return

    def _marks(self) -> tuple[int, int, int, int]:
        """They change when a prefix, an adapter or a request comes or goes."""
        engine, loop = self._loop.engine, self._loop
        return engine.prefix_position, engine.adapter_position, loop.num_waiting, loop.num_running
