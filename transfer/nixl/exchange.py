"""The thread that alone talks to NIXL: it writes, sends notes, and takes those of the peers."""

import logging
import threading
import time
from collections import deque
from typing import Any

import torch

from tandem.transfer.errors import TransportError, TransportTimeout
from tandem.transfer.nixl.memory import NixlMemory
from tandem.transfer.nixl.peer import Item, Kind, Note, Peer

AT_ONCE = 4  # writes to one peer
BEAT_SECONDS = 1.0
BUSY_SECONDS = 0.001  # since something happened. Until then a thread that waits looks again after
BUSY_PAUSE_SECONDS = 0.00002  # so long: one that never sleeps has its core taken away just when it is needed
IDLE_SECONDS = 0.00025  # and then after so long. Over TCP the receiver's own thread moves what a peer writes
END_SECONDS = 10.0
log = logging.getLogger(__name__)


class Exchange:
    """Of one epoch. Without a thread of NIXL's own, which would keep a core busy."""

    def __init__(
        self, agent: Any, names: dict[str, Peer], memory: NixlMemory, write_seconds: float, silent_seconds: float
    ) -> None:
        """agent: has the peers' metadata, and is this thread's from now on. names: of the peers' agents. write_seconds,
        silent_seconds: how long a write may take, and a peer be silent, until the peer is lost."""
        self._agent, self._names, self._memory = agent, names, memory
        self._write_seconds, self._silent_seconds = write_seconds, silent_seconds
        self._begun: dict[int, deque[tuple[Item, Any]]] = {peer.pe: deque() for peer in names.values()}
        self._moved = dict.fromkeys(self._begun, 0.0)  # when the oldest write of a peer came to be the oldest
        self._sent, self._said = dict.fromkeys(self._begun, 0), dict.fromkeys(self._begun, 0)  # numbers of notes
        self._beat = dict.fromkeys(self._begun, 0.0)
        self._heard = dict.fromkeys(self._begun, 0.0)  # 0 until the first note: it may not have joined
        self._gone: set[int] = set()
        self._turned = time.monotonic()
        self._due = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something was given to a peer."""
        self._due.set()

    def close(self) -> None:
        """No write of ours is under way any more. TransportTimeout."""
        self._ended = True
        self._due.set()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            raise TransportTimeout(f"writes of NIXL did not end within {END_SECONDS:g} s; they may still land")

    def _run(self) -> None:
        device = self._memory.device
        try:
            if device is not None:
                torch.cuda.set_device(device)
                torch.cuda.set_stream(torch.cuda.Stream(device))
            self._turns()
        except Exception as error:
            log.exception("NIXL ends")
            for peer in self._names.values():
                peer.fail(f"NIXL has ended here: {error}")
        for name, peer in self._names.items():
            self._let_go(name, peer)

    def _turns(self) -> None:
        busy_until = 0.0
        while not self._ended:
            now = time.monotonic()
            self._allow_pause(now)
            moved = self._take_notes(now)
            for name, peer in self._names.items():
                if peer.failure:
                    self._let_go(name, peer)
                    continue
                try:
                    moved |= self._advance(name, peer, now)
                except Exception as error:  # NIXL's have no common class
                    peer.fail(f"its connection is lost: {error}")
            if moved or any(self._begun.values()):
                busy_until = now + BUSY_SECONDS
            if not moved:
                self._due.wait(BUSY_PAUSE_SECONDS if now < busy_until else IDLE_SECONDS)
                self._due.clear()

    def _allow_pause(self, now: float) -> None:
        """Where this process was stopped, its peers were not silent for so long."""
        if now > self._turned + BEAT_SECONDS:
            for times in (self._heard, self._moved):
                times.update({pe: now for pe, then in times.items() if then})
        self._turned = now

    def _take_notes(self, now: float) -> bool:
        arrived = self._agent.get_new_notifs()
        for name, notes in arrived.items():
            peer = self._names.get(name)
            if peer is None:
                log.warning("notes of an agent that is not of this epoch are ignored")
                continue
            self._heard[peer.pe] = now
            try:
                for note in notes:
                    if not peer.failure:
                        self._take(peer, *Note.unpack(note))
            except Exception as error:
                log.exception("PE %d is cut off", peer.pe)
                peer.fail(f"it was cut off: {error}")
        return bool(arrived)

    def _take(self, peer: Peer, note: Note, number: int) -> None:
        """TransportError for a note that no PE sends then."""
        memory = self._memory
        if note.kind == Kind.LANDED:
            with peer.lock:
                if number > peer.notes:
                    raise TransportError(f"it says that {number} notes have landed; {peer.notes} were sent")
                peer.acknowledged = max(peer.acknowledged, number)
                peer.progress.notify_all()
            return
        if number != peer.landed + 1:
            raise TransportError(f"note {number} came; {peer.landed + 1} is expected")
        if note.kind == Kind.STAGED:
            memory.sort_in(peer.pe, note.row, int(note.payload), memory.regions[peer.pe])
        elif 0 <= note.row < memory.num_signals:
            memory.post(note.row, note.signal, int(note.payload))
        else:
            raise TransportError(f"a note has row {note.row}; 0 … {memory.num_signals - 1} are accepted")
        peer.landed = number

    def _advance(self, name: str, peer: Peer, now: float) -> bool:
        """Begins what may begin, ends what is done, says what has landed. TransportError, or one of NIXL's."""
        pe, begun = peer.pe, self._begun[peer.pe]
        moved = False
        while len(begun) < AT_ONCE and peer.waiting and _is_ready(peer.waiting[0]):
            item = peer.waiting.popleft()
            if not begun:
                self._moved[pe] = now
            begun.append((item, self._begin(name, item)))
            moved = True
        while begun and self._is_done(begun[0][1]):
            item, handle = begun.popleft()
            if handle is not None:
                handle.release()
            if item.note is not None:
                self._sent[pe] += 1
                self._agent.send_notif(name, item.note.pack(self._sent[pe]))
            self._moved[pe], moved = now, True
            with peer.lock:
                peer.done += 1
                peer.progress.notify_all()
        if begun and now > self._moved[pe] + self._write_seconds:
            raise TransportError(f"a write has taken more than {self._write_seconds:g} s")
        if self._heard[pe] and now > self._heard[pe] + self._silent_seconds:
            raise TransportError(f"it has been silent for {self._silent_seconds:g} s")
        if self._said[pe] != peer.landed or now > self._beat[pe] + BEAT_SECONDS:
            self._said[pe], self._beat[pe] = peer.landed, now
            self._agent.send_notif(name, Note(Kind.LANDED).pack(peer.landed))
        return moved

    def _begin(self, name: str, item: Item) -> Any:
        """A handle of the write that is under way; None without one."""
        if item.source is None or item.target is None:
            return None
        sides = [self._agent.get_xfer_descs(one.spans, one.memory) for one in (item.source, item.target)]
        handle = self._agent.initialize_xfer("WRITE", *sides, name)
        if self._agent.transfer(handle) == "ERR":
            handle.release()
            raise TransportError("NIXL cannot begin a write")
        return handle

    def _is_done(self, handle: Any) -> bool:
        state = "DONE" if handle is None else self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransportError("a write of NIXL failed")
        return state == "DONE"

    def _let_go(self, name: str, peer: Peer) -> None:
        """Cancels what is under way to a peer, and ends the connection."""
        if peer.pe in self._gone:
            return
        self._gone.add(peer.pe)
        try:
            for _, handle in self._begun[peer.pe]:
                if handle is not None:
                    handle.release()
            self._begun[peer.pe].clear()
            self._agent.remove_remote_agent(name)
        except Exception:
            log.exception("the connection to PE %d did not end", peer.pe)


def _is_ready(item: Item) -> bool:
    return item.ready is None or item.ready.query()
