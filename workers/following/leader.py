"""Rank 0 of a worker of several ranks: its engine tells the others what it does, before it does that."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tandem.cache.operations.holdings import SequenceState
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.transport import Fence, Transport
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.rank_progress import RankProgress
from tandem.workers.engine.watched_engine import Nested, WatchedEngine, Watcher
from tandem.workers.errors import RankLost
from tandem.workers.following.calls import (
    AGREE_SECONDS,
    ALONE,
    DIGEST,
    END,
    FENCE,
    MARK,
    WELCOME,
    Call,
    Ended,
    call_types,
    handles_in,
)
from tandem.workers.ranks.rank_memory import (
    ADAPTER,
    DONE,
    LOST,
    PID,
    CallWriter,
    RankMemory,
    RankState,
    digest_word,
    keep_order,
    wait_until,
)
from tandem.workers.ranks.rank_memory import DIGEST as DIGEST_WORD
from tandem.workers.ranks.rank_memory import MARK as MARKS
from tandem.workers.ranks.ranks import Ranks
from tandem.workers.ranks.shared_ranks import end_waits, num_entered
from tandem.workers.replay.codec import Encoder
from tandem.workers.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)
WAIT_SECONDS = 30.0  # for followers to read a call, or to make it


class Leader:
    """Writes the actions of an engine down for its followers. Owned by the step thread."""

    def __init__(self, memory: RankMemory) -> None:
        self.memory = memory
        self.lost = ""  # why this worker cannot continue
        memory.states[0].set(PID, os.getpid())
        self._writer = CallWriter(memory, WAIT_SECONDS)
        self._encoder = Encoder(call_types(), secrets=True)
        self.acting = False
        self._messages = 0
        self._has_raised = False  # the last action, here

    def act(self, engine: Engine, name: str, arguments: tuple[Any, ...], action: Callable[..., Any]) -> Any:
        """See Watcher. Raises RankLost, too."""
        if self.acting or name in ALONE:
            return action(engine, *arguments)
        self.tell(name, arguments)
        self.acting, made, raised = True, (), ""
        try:
            result = action(engine, *arguments)
            made = tuple(map(self._encoder.number, handles_in(result)))
            return result
        except RankLost as error:
            self.give_up(str(error))
            raise
        except Exception as error:
            if why := self.memory.why_failed(0):
                self.give_up(why)
                raise RankLost(why) from error
            raised = type(error).__name__
            raise
        finally:
            self.acting, self._has_raised = False, bool(raised)
            if not self.lost:
                self._write(Ended(made, raised, engine.pages.free), name)

    def tell(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        """Writes a call down. Raises RankLost. After an error it first waits until the followers have had it, too: one
        that had not would take its part of the old forward in the sums of the next."""
        if self.lost:
            raise RankLost(self.lost)
        if self._has_raised:
            self.wait_for_all(AGREE_SECONDS, "a rank has not had the leader's error")
            self._has_raised = False
        self._write(Call(self._encoder.gone(), name, arguments), name)

    def wait_for_all(self, seconds: float = WAIT_SECONDS, otherwise: str = "a rank lags behind") -> None:
        """Returns once the followers have made all calls. Raises RankLost, with that text, after so many seconds."""
        messages, states = self._messages, self.memory.states[1:]
        try:
            wait_until(lambda: all(_has_done(state, messages) for state in states), seconds, otherwise)
        except RankLost as error:
            self.give_up(str(error))
            raise

    def _write(self, message: Call | Ended, where: str) -> None:
        try:
            self._writer.write(self._encoder.encode(message, where))
            self._messages += 1
            self.memory.states[0].set(DONE, self._messages)
        except RankLost as error:
            self.give_up(str(error))
            raise

    def give_up(self, reason: str) -> None:
        """Ends the worker. All ranks stop waiting for each other."""
        if not self.lost:
            log.error("the ranks of this worker end: %s", reason)
        self.lost = self.lost or reason
        end_waits(self.memory.sums)

    def close(self) -> None:
        """Tells the followers that no more calls come, as far as they still listen."""
        with suppress(RankLost):
            self.tell(END)


def _has_done(state: RankState, messages: int) -> bool:
    if state.get(LOST):
        raise RankLost("a rank cannot continue; its log has the reason")
    return state.get(DONE) >= messages


class LeadingEngine(WatchedEngine):
    """The leader's engine. A poll counts once all ranks agree."""

    def __init__(
        self,
        cache: PagedKVCache,
        runner: ModelRunner,
        transport: Transport,
        leader: Leader,
        shared: Ranks,
        token_bytes: int,
        watcher: Watcher | None = None,
    ) -> None:
        """token_bytes: of a token's entries in the whole model. watcher: sees the actions that are led."""
        super().__init__(cache, runner, transport, Nested(watcher, leader) if watcher else leader, shared)
        self._leader = leader
        self._token_bytes = token_bytes
        self._followers = leader.memory.states[1:]
        self._marks = 0
        self._fences = [0] * transport.num_pes

    def expect(self, sequence: int, num_tokens: int) -> PositionMap:
        """A peer writes there as soon as it knows. So each rank has dropped these pages before."""
        found = super().expect(sequence, num_tokens)
        self.wait_for_ranks()
        return found

    def welcome(self, pe: int, epoch: int) -> None:
        """Followers admit the process after their earlier calls, which may write to the process before it."""
        super().welcome(pe, epoch)
        self._leader.tell(WELCOME, (pe,))

    def wait_for_ranks(self) -> None:
        self._leader.wait_for_all()

    def sequence(self, sequence: int) -> SequenceState:
        """Returns the state of a sequence. Its bytes_sent count what all ranks have sent."""
        found = super().sequence(sequence)
        return found._replace(bytes_sent=found.bytes_sent * self._token_bytes // self.layout.token_bytes)

    def digest(self, sequence: int, begin: int, end: int, sliding: tuple[int, int] | None = None) -> int:
        """Computes a digest. Within an action the followers do it, too."""
        if not self._leader.acting:
            self._leader.tell(DIGEST, (sequence, begin, end, sliding))
        return super().digest(sequence, begin, end, sliding)

    def peers_mark(self) -> Callable[[], bool] | None:
        return self.mark(copies=True) if self.lets_go or self._cache.has_copies else None

    def mark(self, *, copies: bool = False) -> Callable[[], bool]:
        """Marks the device's queue. Followers look at their copies in any case."""
        own = super().mark(copies=copies)
        self._marks += 1
        self._leader.tell(MARK)
        number, followers = self._marks, self._followers

        def is_past() -> bool:
            return (own is None or own()) and all(state.get(MARKS) >= number for state in followers)

        return is_past

    def fence(self, pe: int) -> Fence:
        own = super().fence(pe)
        self._fences[pe] += 1
        self._leader.tell(FENCE, (pe,))
        return _RanksFence(own, [state.fences for state in self._followers], pe, self._fences[pe])

    def mailbox(self) -> Int64Array:
        found = super().mailbox()
        for state in self._followers:
            words = found[: state.signals.size, 0]
            np.copyto(words, 0, where=state.signals != words)
        return found

    def ranks_have_read(self, number: int, digest: bytes) -> bool | None:
        if any(state.get(ADAPTER) != number for state in self._followers):
            return None
        keep_order()
        return all(state.get(DIGEST_WORD) == digest_word(digest) for state in self._followers)

    @property
    def ranks(self) -> list[RankProgress]:
        memory = self._leader.memory
        return [
            RankProgress(state.get(PID), num_entered(memory.sums, rank), state.get(DONE))
            for rank, state in enumerate(memory.states)
        ]

    @property
    def lost(self) -> str:
        lost = [rank for rank, state in enumerate(self._followers, 1) if state.get(LOST)]
        here = self._leader.lost or self._leader.memory.why_failed(0) or super().lost
        return here or (f"rank {lost[0]} of this worker cannot continue" if lost else "")


class _RanksFence:
    def __init__(self, own: Fence, fences: list[Int64Array], pe: int, number: int) -> None:
        self._own, self._fences, self._pe, self._number = own, fences, pe, number

    def is_quiet(self) -> bool:
        return self._own.is_quiet() and all(int(one[self._pe]) >= self._number for one in self._fences)
