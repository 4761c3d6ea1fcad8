"""How a receiver takes a reservation back from its writer when no one else can say that the writer is quiet.

One-sided both ways: it needs no gateway and no RPC. After its signal rows every mailbox has two lanes for each PE,
which that PE alone writes: one for what it asks, one for what it answers. So two workers may write for each other at
the same time.

    receiver D                                      writer P
    recall(row, generation)  ═══ D's asks ═══►      refuses that use of the row for good, writes no more for it, quiet
    frees pages and row      ◄═══ P's answers ═══   the same word

A lane holds one recall at a time; the receiver posts the next when the answer to the last has come, or is not wanted
any more because somebody else said that the writer is quiet.
"""

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tandem.transfer.completion import Int64Array, Signal, pack_signal, unpack_signal
from tandem.transfer.errors import TransportError
from tandem.transfer.transport import Transport

log = logging.getLogger(__name__)

LANES = 2  # of each PE in a mailbox


def mailbox_rows(num_signals: int, num_pes: int) -> int:
    """Rows that a mailbox needs for num_signals reservations and the lanes."""
    return num_signals + LANES * num_pes


def num_request_rows(transport: Transport) -> int:
    """Rows for reservations; after them are what each PE asks, then what each PE answers."""
    return transport.num_signals - LANES * transport.num_pes


@dataclass(frozen=True)
class Recall:
    """A recall of one use of a mailbox row of the receiver's. pe: at a writer, the receiver's; at a receiver, the
    writer's. signal: the use of the row."""

    pe: int
    signal: Signal


class RecallDesk:
    """The receiver's end. Owned by its step thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asks = num_request_rows(transport)
        self._answers = self._asks + transport.num_pes
        self._queues: dict[int, deque[Recall]] = {}  # by writer
        self._posted: dict[int, Recall] = {}  # what stands in each writer's lane

    def ask(self, recall: Recall) -> None:
        """Queues a recall."""
        self._queues.setdefault(recall.pe, deque()).append(recall)

    def withdraw(self, recall: Recall) -> None:
        """Removes a recall that is not wanted any more."""
        with suppress(ValueError):
            self._queues[recall.pe].remove(recall)

    def forget(self, pe: int) -> None:
        """Forgets a writer that has gone. Nothing is asked of it any more."""
        self._queues.pop(pe, None)
        self._posted.pop(pe, None)

    def exchange(self, mailbox: Int64Array) -> list[Recall]:
        """Posts what can be posted; the recalls that have been answered. A post that fails is tried again."""
        answered = []
        for pe, queue in self._queues.items():
            if queue and self._posted.get(pe) == queue[0] and int(mailbox[self._answers + pe, 0]) == _word(queue[0]):
                answered.append(queue.popleft())
            if queue and self._posted.get(pe) != queue[0]:
                self._post(queue[0])
        return answered

    def _post(self, recall: Recall) -> None:
        try:
            self._transport.post(recall.pe, self._asks + self._transport.pe, _word(recall), self._transport.epoch)
        except TransportError as error:
            log.warning("a recall could not be posted to PE %d: %s", recall.pe, error)
        else:
            self._posted[recall.pe] = recall


class RecallInbox:
    """The writer's end. Owned by its step thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asks = num_request_rows(transport)
        self._answers = self._asks + transport.num_pes
        self._answered = np.zeros(transport.num_pes, np.int64)

    def unanswered(self) -> list[Recall]:
        """Returns the recalls that wait for answer()."""
        words = self._transport.mailbox()[self._asks : self._answers, 0]
        waiting = np.flatnonzero(words != self._answered)
        return [Recall(pe, _signal(int(words[pe]))) for pe in waiting.tolist()]

    def forget(self, pe: int) -> None:
        """Clears the lanes of a PE that was cut, because another process has them next."""
        for lanes in (self._asks, self._answers):
            self._transport.post(self._transport.pe, lanes + pe, 0, 0)
        self._answered[pe] = 0

    def answer(self, recall: Recall) -> None:
        """Says that this PE is quiet towards the receiver, and writes and posts no more under that signal."""
        word = _word(recall)
        self._transport.post(recall.pe, self._answers + self._transport.pe, word, self._transport.epoch)
        self._answered[recall.pe] = word


def _word(recall: Recall) -> int:
    return pack_signal(recall.signal.generation, recall.signal.row)


def _signal(word: int) -> Signal:
    generation, row = unpack_signal(word)
    return Signal(row, generation)
