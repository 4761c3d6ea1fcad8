"""A rank that is not the first: it does what the leader does, on its shard, and answers nobody."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from tandem.transfer.errors import PeerGone, TransportError
from tandem.transfer.transport import Fence, Transport
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.watched_engine import PARAMETERS
from tandem.workers.errors import RankLost
from tandem.workers.following import calls
from tandem.workers.following.calls import Call, Ended, call_types, handles_in
from tandem.workers.ranks.rank_memory import (
    ADAPTER,
    DIGEST,
    DONE,
    LOST,
    PID,
    CallReader,
    RankMemory,
    digest_word,
    keep_order,
)
from tandem.workers.ranks.rank_memory import MARK as MARKS
from tandem.workers.ranks.shared_ranks import end_waits
from tandem.workers.replay.codec import Decoder

log = logging.getLogger(__name__)
SPIN_SECONDS = 0.0002  # after a call, before it sleeps between looks
IDLE_PART = 0.02  # of the time without a call that it sleeps between two looks
MOST_SLEEP_SECONDS = 0.002  # so an idle rank takes about a hundredth of a core
COMMAND_SECONDS = 0.01  # after which commands have their turn
IsPast = Callable[[], bool]


class Follower:
    """Steps of a StepThread. Once it cannot go on it says so and does nothing more."""

    def __init__(self, engine: Engine, transport: Transport, memory: RankMemory, rank: int) -> None:
        self._engine, self._transport = engine, transport
        self._state, self._memory, self._rank = memory.states[rank], memory, rank
        self._state.set(PID, os.getpid())
        self._reader = CallReader(memory, rank)
        self._decoder = Decoder(call_types())
        self._made: list[object] = []  # handles of the last action's result
        self._outcome = Ended()
        self._marks: deque[tuple[int, IsPast]] = deque()
        self._num_marks = self._done = 0
        self._fences: list[deque[tuple[int, IsPast]]] = [deque() for _ in range(transport.num_pes)]
        self._num_fences = [0] * transport.num_pes
        self._ended = False
        self._called = time.monotonic()  # when the last call came
        self.captures = 0  # that are done
        self.lost = ""  # why this rank cannot go on

    def step(self) -> float | None:
        """See Steps."""
        until = time.monotonic() + COMMAND_SECONDS
        while not self.lost and not self._ended:
            try:
                call = self._reader.read()
                if call is not None:
                    self._take(self._decoder.decode(call))
                elif self._outcome.raised and time.monotonic() - self._called > calls.AGREE_SECONDS:
                    raise RankLost(f"{self._outcome.raised} was raised here, and the leader has not had it")
                self._publish()
            except Exception as error:
                log.exception("this rank cannot follow its leader any more")
                self.give_up(self._memory.why_failed(self._rank) or f"{type(error).__name__}: {error}")
                break
            now = time.monotonic()
            if call is not None:
                self._called = now
            elif (idle := now - self._called) > SPIN_SECONDS:
                time.sleep(min(idle * IDLE_PART, MOST_SLEEP_SECONDS))
            if now > until:
                return 0
        return None

    def finish(self, seconds: float) -> None:
        """Makes the calls up to the leader's last, whose device may wait for them. Called after the end of the
        follower's thread."""
        deadline = time.monotonic() + seconds
        while not self.lost and not self._ended and time.monotonic() < deadline:
            self.step()

    def give_up(self, reason: str) -> None:
        """Tells the leader, and ends the waits of all ranks."""
        self.lost = self.lost or reason
        self._state.set(LOST, 1)
        end_waits(self._memory.sums)

    def _take(self, message: Ended | Call) -> None:
        if isinstance(message, Ended):
            self._settle(message)
        else:
            self._do(message)
        self._done += 1
        self._state.set(DONE, self._done)

    def _do(self, call: Call) -> None:
        self._decoder.forget(call.gone)
        match call.name:
            case calls.MARK:
                self._num_marks += 1
                self._marks.append((self._num_marks, self._engine.mark(copies=True) or _at_once))
            case calls.FENCE:
                (pe,) = call.arguments
                self._num_fences[pe] += 1
                self._fences[pe].append((self._num_fences[pe], partial(_is_quiet, self._engine.fence(pe))))
            case calls.DIGEST:
                self._engine.digest(*call.arguments)
            case calls.WELCOME:
                with suppress(TransportError):  # it has gone again by now, and its place stays free
                    self._transport.admit(*call.arguments)
            case calls.END:
                self._ended = True
            case name:
                self._act(name, call.arguments)

    def _act(self, name: str, arguments: tuple[object, ...]) -> None:
        raised = ""
        try:
            result = getattr(self._engine, name)(**dict(zip(PARAMETERS[name], arguments, strict=True)))
            self.captures += name == "capture"
            self._made = list(handles_in(result))
        except RankLost:
            raise
        except Exception as error:  # the leader's raises the same, which the next call says
            if why := self._memory.why_failed(self._rank):
                raise RankLost(why) from error
            self._made, raised = [], type(error).__name__
        self._outcome = Ended((), raised, self._engine.pages.free)

    def _settle(self, ended: Ended) -> None:
        """Compares what became of the last action here and at the leader."""
        outcome = self._outcome
        if (ended.raised, ended.free, len(ended.made)) != (outcome.raised, outcome.free, len(self._made)):
            raise RankLost(
                f"an action left {outcome.free} free pages and {len(self._made)} handles here, and raised "
                f"{outcome.raised or 'nothing'}; at the leader {ended.free}, {len(ended.made)} and "
                f"{ended.raised or 'nothing'}"
            )
        self._decoder.known.update(zip(ended.made, self._made, strict=True))
        self._made, self._outcome = [], Ended()

    def _publish(self) -> None:
        self._engine.tend()
        self._state.set(MARKS, _passed(self._marks, self._num_marks))
        for pe, fences in enumerate(self._fences):
            if fences:
                self._state.fences[pe] = _passed(fences, self._num_fences[pe])
        if (read := self._engine.first_adapter_read) is not None and read[0] != self._state.get(ADAPTER):
            self._state.set(DIGEST, digest_word(read[1]))
            keep_order()
            self._state.set(ADAPTER, read[0])
        words = self._transport.mailbox()[: self._state.signals.size, 0]
        np.copyto(self._state.signals, words)


def _passed(waiting: deque[tuple[int, IsPast]], last: int) -> int:
    """Returns the last number that is past, with all before it. last: the last number that ever waited."""
    while waiting and waiting[0][1]():
        waiting.popleft()
    return waiting[0][0] - 1 if waiting else last


def _is_quiet(fence: Fence) -> bool:
    """False for a peer that is lost and not yet cut: writes to it may still read pages here."""
    try:
        return fence.is_quiet()
    except PeerGone:
        return False


def _at_once() -> bool:
    return True
