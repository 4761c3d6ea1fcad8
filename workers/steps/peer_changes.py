"""Peers of a worker that leave and come while it serves."""

from collections.abc import Callable
from typing import Any

from tandem.transfer.transport import Transport
from tandem.workers.steps.step_loop import StepLoop

Command = Callable[[], object]


class PeerChanges:
    """One change at a time, by any thread but the step thread, which goes on: only what changes its state runs there.

    part(pe)    the peer is cut, then what waited for it ends
    offer(pe)   ► handle, for the process that takes its place
    admit(pe)   that process is reached, then calls go there
    """

    def __init__(self, transport: Transport, loop: StepLoop, on_step_thread: Callable[[Command], Any]) -> None:
        self._transport = transport
        self._loop = loop
        self._on_step_thread = on_step_thread

    def part(self, pe: int) -> None:
        """See Transport.cut; what the peer was to write, or to get, ends with PeerLost. Idempotent."""
        self._transport.cut(pe)
        self._on_step_thread(lambda: self._loop.part(pe))

    def offer(self, pe: int, epoch: int) -> bytes:
        """See Transport.offer."""
        return self._transport.offer(pe, epoch)

    def admit(self, pe: int, epoch: int, handle: bytes) -> None:
        """See Transport.reach and Transport.admit."""
        self._transport.reach(pe, handle)
        self._on_step_thread(lambda: self._loop.engine.welcome(pe, epoch))
