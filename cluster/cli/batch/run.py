"""Sends the rows of a batch that have no result yet, so many at a time."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tandem.cluster.cli.batch.calls import CONNECT_SECONDS, Answer, Connection, Server
from tandem.cluster.cli.batch.rows import Results, Row, failure, result
from tandem.cluster.errors import TandemError

FULL = 429
AWAY = (502, 503)
READY = "/ready"
TRIES = 20  # that end with one of AWAY, after which it is about the request if the gateway is ready
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between tries, growing from the first to the second
LONGEST_WAIT = 300.0  # seconds that a gateway may ask for
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
        self._connections: list[Connection] = []

    def run(self, show: Callable[[], None]) -> None:
        """Returns when each row has a result. show: called a few times a second. TandemError where the batch cannot go
        on; what has a result then keeps it, as after KeyboardInterrupt."""
        threads = [threading.Thread(target=self._work, name="batch") for _ in range(self._limits.in_flight)]
        try:
            for thread in threads:
                thread.start()
            while not self._stop.is_set() and (alive := [thread for thread in threads if thread.is_alive()]):
                show()
                alive[0].join(LOOK_SECONDS)
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
        """Returns a row's line; None once the batch stops. Asks a gateway that is away or full again, later."""
        body, timeouts, tries, pause = self._body(row), 0, 0, FIRST_PAUSE
        while not self._stop.is_set():
            wanted, began = 0.0, time.monotonic()
            try:
                answer = connection.call("POST", row.url, body)
            except TimeoutError:
                timeouts += 1
                if timeouts == TIMEOUTS:
                    return failure(row, "timeout", f"no answer within {self._limits.timeout:g} s, {TIMEOUTS} times")
            except OSError as error:
                self._is_away(f"{self._server.host}:{self._server.port}: {error}", began)
            else:
                tries += answer.status in AWAY
                if self._is_about_it(answer, began, tries, connection):
                    return result(row, answer.status, answer.request_id, answer.value)
                wanted = min(answer.retry_seconds or 0.0, LONGEST_WAIT)
            self._stop.wait(max(wanted * random.uniform(1.0, 1.25), pause * random.uniform(0.75, 1.25)))
            pause = min(2 * pause, LONGEST_PAUSE)
        return None

    def _is_about_it(self, answer: Answer, began: float, tries: int, connection: Connection) -> bool:
        """Returns whether an answer is about the request, and not about the gateway. tries: how many ended with one of
        AWAY. Raises TandemError if the gateway will take no request."""
        if answer.status == 401:
            raise TandemError("the gateway asks for another token: TANDEM_API_KEY, or --token-file")
        if answer.status in AWAY and (tries < TRIES or not self._is_ready(connection)):
            self._is_away(f"status {answer.status}: {answer.value!s:.200}", began)
            return False
        self._away_since = None
        return answer.status != FULL

    @staticmethod
    def _is_ready(connection: Connection) -> bool:
        """Returns whether the gateway says that it would serve requests."""
        try:
            return connection.call("GET", READY).status == 200
        except OSError:
            return False

    def _is_away(self, reason: str, began: float) -> None:
        """Notes that the gateway is away. Raises TandemError once it has been away for too long. began: when the call
        without an answer began; a long one was under way."""
        now = time.monotonic()
        if self._away_since is None or now - began > 2 * CONNECT_SECONDS:
            self._away_since = now
        elif now - self._away_since > self._limits.patience and not self._stop.is_set():
            raise TandemError(f"the gateway has been away for {self._limits.patience:g} s: {reason}")

    def _body(self, row: Row) -> dict[str, Any]:
        """Returns the row's body, with the batch's priority unless it has its own."""
        if "priority" in row.body or "service_tier" in row.body:
            return row.body
        priority = self._limits.priority
        return row.body | ({"service_tier": FLEX} if priority is None else {"priority": priority})
