"""Limits how many bytes of requests are under way: from their first byte until they are validated."""

from collections import Counter
from contextvars import ContextVar

from tandem.cluster.errors import Overloaded

SMALL_BODY = 1 << 16  # bytes; as many calls as are admitted may have so much
MIB = 1 << 20
USUAL_MIB, MOST_MIB = 4, 16  # of one body
TOKEN_BYTES = 32  # of text, which JSON may escape

current_body: "ContextVar[Body | None]" = ContextVar("current_body", default=None)
"""The body of the call that this task answers, if its frontend counts it."""


def largest_body(max_message_mib: int | None, max_model_len: int) -> int:
    """Returns the most bytes of one body. max_message_mib: None derives it from what the model can take."""
    if max_message_mib is None:
        max_message_mib = min(MOST_MIB, max(USUAL_MIB, -(-max_model_len * TOKEN_BYTES // MIB)))
    return max_message_mib * MIB


class BodyBudget:
    """The bytes of both frontends' requests together. One client's host may hold half. Owned by the event loop.

    Bodies of up to SMALL_BODY are not counted: gateway.max_calls bounds them, and large bodies keep no small one out.
    """

    def __init__(self, most: int, largest: int) -> None:
        """largest: bytes of one body; there is room for one at least."""
        self._most = max(most, largest)
        self._most_of_host = max(most // 2, largest)
        self._of_hosts: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._of_hosts.total()

    def open(self, host: str) -> "Body":
        return Body(self, host)

    def move(self, host: str, more: int) -> None:
        """Counts `more` bytes, which may be negative. Raises Overloaded when there is no room for them."""
        of_host = self._of_hosts[host] + more
        held = self.held + more
        if more > 0 and of_host > self._most_of_host:
            raise Overloaded(
                f"requests of {_mib(of_host)} are being received from this host; at most {_mib(self._most_of_host)} "
                "are allowed, half of gateway.max_bodies_mib"
            )
        if more > 0 and held > self._most:
            raise Overloaded(
                f"requests of {_mib(held)} are being received; at most {_mib(self._most)} are allowed "
                "(gateway.max_bodies_mib)"
            )
        if of_host:
            self._of_hosts[host] = of_host
        else:
            del self._of_hosts[host]


class Body:
    """The bytes that one request holds of a budget. release() is idempotent."""

    def __init__(self, budget: BodyBudget, host: str) -> None:
        self._budget = budget
        self._host = host
        self._held = 0
        self.requests = 1  # of the body that are not validated yet
        self.tokens = 0  # of prompts and outputs that its validated requests ask for
        self.failed = False  # one of its requests has, and ends the others

    def hold(self, size: int) -> None:
        """Counts so many bytes, which the body has or will have. Raises Overloaded when there is no room for them."""
        counted = size if size > SMALL_BODY else 0
        if counted != self._held:
            self._budget.move(self._host, counted - self._held)
            self._held = counted

    def release(self) -> None:
        self.hold(0)


def release_current_body() -> None:
    """Counts a request as validated. Releases its body once all requests of the body are validated."""
    body = current_body.get()
    if body is not None:
        body.requests -= 1
        if body.requests <= 0:
            body.release()


def _mib(size: int) -> str:
    return f"{size / MIB:.3g} MiB"
