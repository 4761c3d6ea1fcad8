"""The thread that alone talks to NIXL: it writes, sends notes, and takes the peers' notes."""

import logging
import threading
import time
from collections import deque
from typing import Any

import torch

from tandem.transfer.errors import TransportError, TransportTimeout
from tandem.transfer.nixl.link import Link
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
    """The exchange of one epoch. It uses no threads of NIXL's own, which would keep a core busy."""

    def __init__(self, memory: NixlMemory, write_seconds: float, silent_seconds: float) -> None:
        """write_seconds, silent_seconds: how long a write may take, and a peer be silent, until the peer is lost."""
        self._memory = memory
        self._write_seconds, self._silent_seconds = write_seconds, silent_seconds
        self._links: list[Link] = []
        self._added: deque[Link] = deque()
        self._turned = time.monotonic()
        self._due = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def add(self, link: Link) -> None:
        """The link, which is connected, is this thread's from now on. From any thread."""
        self._added.append(link)
        self._due.set()

    def cut(self, link: Link, reason: str) -> None:
        """Nothing lands here from that link any more. From any thread. TransportTimeout."""
        link.peer.fail(reason)
        self._due.set()
        if not link.ended.wait(END_SECONDS):
            raise TransportTimeout(f"the connection of PE {link.peer.pe} did not end within {END_SECONDS:g} s")

    def wake(self) -> None:
        """Wakes the thread, because a peer was given something."""
        self._due.set()

    def close(self) -> None:
        """Waits until no write of this PE is under way. TransportTimeout."""
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
            for link in self._links:
                link.peer.fail(f"NIXL has ended here: {error}")
        for link in (*self._links, *self._added):
            link.end()

    def _turns(self) -> None:
        busy_until = 0.0
        while not self._ended:
            now = time.monotonic()
            while self._added:
                self._links.append(self._added.popleft())
            self._allow_pause(now)
            moved = False
            for link in list(self._links):
                if link.peer.failure:
                    link.end()
                    self._links.remove(link)
                    continue
                try:
                    moved |= self._take_notes(link, now)
                    moved |= not link.peer.failure and self._advance(link, now)
                except Exception as error:  # NIXL's have no common class
                    link.peer.fail(f"its connection is lost: {error}")
            if moved or any(link.begun for link in self._links):
                busy_until = now + BUSY_SECONDS
            if not moved:
                self._due.wait(BUSY_PAUSE_SECONDS if now < busy_until else IDLE_SECONDS)
                self._due.clear()

    def _allow_pause(self, now: float) -> None:
        """Resets the clocks after a pause of this process, in which its peers were not silent."""
        if now > self._turned + BEAT_SECONDS:
            for link in self._links:
                link.heard, link.moved = link.heard and now, link.moved and now
        self._turned = now

    def _take_notes(self, link: Link, now: float) -> bool:
        assert link.remote is not None, "it is connected"
        arrived = link.agent.get_new_notifs()
        for name, notes in arrived.items():
            if name != link.remote.name:
                log.warning("notes of an agent that is not of this epoch are ignored")
                continue
            link.heard = now
            try:
                for note in notes:
                    if not link.peer.failure:
                        self._take(link.peer, *Note.unpack(note))
            except Exception as error:
                log.exception("PE %d is cut off", link.peer.pe)
                link.peer.fail(f"it was cut off: {error}")
        return bool(arrived)

    def _take(self, peer: Peer, note: Note, number: int) -> None:
        """Takes a note. TransportError for a note that no PE sends then."""
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
            raise TransportError(f"a note has row {note.row}; it must be from 0 to {memory.num_signals - 1}")
        peer.landed = number

    def _advance(self, link: Link, now: float) -> bool:
        """Begins what may begin, ends what is done, says what has landed. TransportError, or one of NIXL's."""
        assert link.remote is not None, "it is connected"
        peer, begun, name = link.peer, link.begun, link.remote.name
        moved = False
        while len(begun) < AT_ONCE and peer.waiting and _is_ready(peer.waiting[0]):
            item = peer.waiting.popleft()
            if not begun:
                link.moved = now
            begun.append((item, self._begin(link, item)))
            moved = True
        while begun and self._is_done(begun[0][1], link):
            item, handle = begun.popleft()
            if handle is not None:
                handle.release()
            if item.note is not None:
                link.sent += 1
                link.agent.send_notif(name, item.note.pack(link.sent))
            link.moved, moved = now, True
            with peer.lock:
                peer.done += 1
                peer.progress.notify_all()
        if begun and now > link.moved + self._write_seconds:
            raise TransportError(f"a write has taken more than {self._write_seconds:g} s")
        if link.heard and now > link.heard + self._silent_seconds:
            raise TransportError(f"it has been silent for {self._silent_seconds:g} s")
        if link.said != peer.landed or now > link.beat + BEAT_SECONDS:
            link.said, link.beat = peer.landed, now
            link.agent.send_notif(name, Note(Kind.LANDED).pack(peer.landed))
        return moved

    def _begin(self, link: Link, item: Item) -> Any:
        """Begins a write, and returns its handle; None without a write."""
        if item.source is None or item.target is None or link.remote is None:
            return None
        agent = link.agent
        sides = [agent.get_xfer_descs(one.spans, one.memory) for one in (item.source, item.target)]
        handle = agent.initialize_xfer("WRITE", *sides, link.remote.name)
        if agent.transfer(handle) == "ERR":
            handle.release()
            raise TransportError("NIXL cannot begin a write")
        return handle

    def _is_done(self, handle: Any, link: Link) -> bool:
        state = "DONE" if handle is None else link.agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransportError("a write of NIXL failed")
        return state == "DONE"


def _is_ready(item: Item) -> bool:
    return item.ready is None or item.ready.query()
