"""Rows that pause while the prompt of a more urgent request is computed."""

from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.scheduling.decode_rows import DecodeRows
from tandem.workers.wire.lease import Clock

MOST_SECONDS = 1.0  # that rows may pause; used up by pauses, and regained as fast between them
LEAST_SECONDS = 0.1  # that must be left when a pause begins


class YieldedRows:
    """Takes rows out of the next steps while a prompt of a lower priority number is computed: then it has steps of its
    own, and waits for no row's token. They keep their pages. Owned by the step thread.

    All pauses together take at most half of the time, however many urgent prompts come.
    """

    def __init__(self, rows: DecodeRows, clock: Clock) -> None:
        self._rows, self._clock = rows, clock
        self._requests: list[DecodeRequest] = []
        self._allowed = MOST_SECONDS  # what is left
        self._looked = clock()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[DecodeRequest]:
        return self._requests

    @property
    def positions(self) -> int:
        """The positions that are stored of all these rows."""
        return sum(request.length for request in self._requests)

    def update(self, urgent: int | None) -> list[DecodeRequest]:
        """Called before each batch, and the step in flight is read before the next call. So a row that left in an
        earlier call has all its tokens. Returns the requests that go on, which get a row.

        urgent: the lowest priority number of a prompt that is computed now; None without one.
        """
        now = self._clock()
        passed, self._looked = now - self._looked, now
        self._allowed = min(self._allowed + (-passed if self._requests else passed), MOST_SECONDS)
        if self._allowed <= (0 if self._requests else LEAST_SECONDS):
            urgent = None
        found = [one for one in self._requests if urgent is None or one.level <= urgent]
        self.forget(*found)
        if urgent is not None and self._rows.last_level > urgent:
            leaving = [request for request in self._rows.requests if request.level > urgent]
            self._rows.leave(leaving)
            self._requests += leaving
        return found

    def forget(self, *requests: DecodeRequest) -> None:
        """Forgets requests that end or leave. Others are skipped."""
        if self._requests:
            gone = set(requests)
            self._requests = [one for one in self._requests if one not in gone]
