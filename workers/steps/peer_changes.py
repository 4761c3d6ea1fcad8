"""Peers of a worker that leave and come while it serves."""

from collections.abc import Callable
from typing import Any

from tandem.transfer.transport import Transport
from tandem.workers.following.worker_ranks import WorkerRanks
from tandem.workers.steps.step_loop import StepLoop

Command = Callable[[], object]


class PeerChanges:
    """One change at a time, by any thread but the step thread, which goes on: only what changes its state runs there.

    cut(pe)     on each rank of this worker: nothing goes to the peer any more, and nothing of it lands here
    part(pe)    then, on the first rank: what waited for it ends
    offer(pe)   on each rank ► handle, for the process that takes its place
    reach(pe)   on each rank: that process is reached
    admit(pe)   then, on the first rank: calls go there
    """

    def __init__(self, transport: Transport, loop: StepLoop | None, on_step_thread: Callable[[Command], Any]) -> None:
        """loop: the first rank's loop; None on other ranks."""
        self._transport = transport
        self._loop = loop
        self._on_step_thread = on_step_thread

    def cut(self, pe: int) -> None:
        """See Transport.cut. Idempotent."""
        self._transport.cut(pe)

    def part(self, pe: int) -> None:
        """Ends with PeerLost what the peer was to write or to get. Idempotent."""
        loop = self._leading
        self._on_step_thread(lambda: loop.part(pe))

    def offer(self, pe: int, epoch: int) -> bytes:
        """See Transport.offer."""
        return self._transport.offer(pe, epoch)

    def reach(self, pe: int, handle: bytes) -> None:
        """See Transport.reach. handle: of each rank of the peer, in a bundle."""
        self._transport.reach(pe, WorkerRanks.of_transport(handle))

    def admit(self, pe: int, epoch: int) -> None:
        """See Transport.admit."""
        loop = self._leading
        self._on_step_thread(lambda: loop.engine.welcome(pe, epoch))

    @property
    def _leading(self) -> StepLoop:
        assert self._loop is not None, "the first rank has the requests"
        return self._loop
