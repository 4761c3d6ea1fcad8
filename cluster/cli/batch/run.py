"""Sends the rows of a batch that have no result yet, so many at a time."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tandem.cluster.cli.batch.calls import Answer, Connection, Server
from tandem.cluster.cli.batch.rows import Results, Row, failure, result
from tandem.cluster.errors import TandemError

FULL = 429
AWAY = (502, 503)
TRIES = 20  # that end with one of these while others are answered, after which it is about the request
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between tries, growing from the first to the second
TIMEOUTS = 3  # of one row, after which it counts as failed
LOOK_SECONDS = 0.2
FLEX = "flex"  # the tier of the last priority that the gateway gives


@dataclass(frozen=True)
class Limits:
    """in_flight: requests at a time. timeout: seconds for one answer. patience: seconds for which the gateway may be
    away before the batch stops. priority: of rows that name none; None: the gateway's last."""

    in_flight: int
    timeout: float
    patience: float
    priority: int | None = None


class Batch:
    """One run. Threads send; the caller's watches."""

    def __init__(self, server: Server, limits: Limits, rows: Iterator[Row], results: Results) -> None:
        """rows: those to send. results: gets a line for each."""
        self._server = server
        self._limits = limits
        self._rows = rows
        self._results = results
        self._taking = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._away_since: float | None = None  # None while the gateway is there
        self._answered = 0
        self._connections: list[Connection] = []

    def run(self, show: Callable[[], None]) -> None:
        """Returns when each row has a result. show: called a few times a second. TandemError where the batch cannot go
        on; what has a result then keeps it, as after KeyboardInterrupt."""
        threads = [
            threading.Thread(target=self._work, name="batch", daemon=True) for _ in range(self._limits.in_flight)
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                show()
                next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(LOOK_SECONDS)
        finally:
            self._stop.set()
            for connection in list(self._connections):
                connection.break_off()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        show()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        connection = Connection(self._server, self._limits.timeout)
        self._connections.append(connection)
        try:
            while not self._stop.is_set() and (row := self._next()) is not None:
                line = self._line(connection, row)
                if line is not None:
                    self._results.add(line)
        except BaseException as error:
            self._failure = self._failure or error
            self._stop.set()
        finally:
            connection.close()

    def _next(self) -> Row | None:
        with self._taking:
            return next(self._rows, None)

    def _line(self, connection: Connection, row: Row) -> dict[str, Any] | None:
        """None once the batch stops. A gateway that is away or full is asked again, later."""
        body, timeouts, tries, pause, before = self._body(row), 0, 0, FIRST_PAUSE, self._answered
        while not self._stop.is_set():
            wanted = 0.0
            try:
                answer = connection.call("POST", row.url, body)
            except TimeoutError:
                timeouts += 1
                if timeouts == TIMEOUTS:
                    return failure(row, "timeout", f"no answer within {self._limits.timeout:g} s, {TIMEOUTS} times")
            except OSError as error:
                self._is_away(f"{self._server.host}:{self._server.port}: {error}")
            else:
                tries += answer.status in AWAY
                if self._is_about_it(answer, lonely=tries < TRIES or self._answered == before):
                    self._answered += 1
                    return result(row, answer.status, answer.request_id, answer.value)
                wanted = answer.retry_seconds or 0.0
            self._stop.wait(max(wanted, pause) * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    def _is_about_it(self, answer: Answer, *, lonely: bool) -> bool:
        """Whether an answer is the request's, and not a word about the gateway. lonely: a status of AWAY is one, too.
        TandemError where no request will be taken."""
        if answer.status == 401:
            raise TandemError("the gateway asks for another token: TANDEM_API_KEY, or --token-file")
        if answer.status in AWAY and lonely:
            self._is_away(f"status {answer.status}: {answer.value!s:.200}")
            return False
        self._away_since = None
        return answer.status != FULL

    def _is_away(self, reason: str) -> None:
        """TandemError once it has been for too long."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
        elif now - self._away_since > self._limits.patience and not self._stop.is_set():
            raise TandemError(f"the gateway has been away for {self._limits.patience:g} s: {reason}")

    def _body(self, row: Row) -> dict[str, Any]:
        """With the priority of the batch, unless it has its own."""
        if "priority" in row.body or "service_tier" in row.body or row.url.endswith("/embeddings"):
            return row.body
        priority = self._limits.priority
        return row.body | ({"service_tier": FLEX} if priority is None else {"priority": priority})
