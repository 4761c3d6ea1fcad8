"""The receiving ends of the connections from one peer. Each runs in a thread of its own, until the connection ends."""

import logging
import socket
import ssl
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tandem.transfer.errors import PeerGone, TransportError
from tandem.transfer.regions import Regions
from tandem.transfer.tcp.frames import (
    DATA_CONNECTIONS,
    HEADER,
    SIGNAL,
    STAGED_BYTES,
    Header,
    Kind,
    entry_bytes,
    read_header,
    read_signal,
)
from tandem.transfer.tcp.memory import PageMemory
from tandem.transfer.tcp.peer import Peer

log = logging.getLogger(__name__)


def receive_frames(connection: socket.socket, peer: Peer, number: int, memory: PageMemory) -> None:
    """Data connection `number`. Whole pages are read into their places, slots and tokens through a buffer."""
    reader = FrameReader(connection, memory, memory.regions[peer.pe])

    def land() -> None:
        reader.land_next()
        with peer.lock:
            peer.landed[number] += 1
            peer.frame_landed.notify()
            peer.signals_due.notify()

    _until_lost(peer, land)


def receive_signals(connection: socket.socket, peer: Peer, memory: PageMemory) -> None:
    """Signals are written into the mailbox once all frames before them have landed."""
    buffer = memoryview(bytearray(SIGNAL.size))

    def take() -> None:
        read_exactly(connection, buffer)
        frame = read_signal(bytes(buffer), memory.num_signals)
        with peer.lock:
            if frame.kind == Kind.LANDED:
                if any(there > given for there, given in zip(frame.counts, peer.given, strict=True)):
                    raise TransportError(f"it says that {frame.counts} frames have landed; {peer.given} were sent")
                peer.acknowledged = frame.counts
                peer.progress.notify_all()
                return
            before = frame.counts[:DATA_CONNECTIONS]
            peer.frame_landed.wait_for(lambda: peer.failure or all(map(int.__ge__, peer.landed, before)))
            peer.check()
            memory.post(frame.row, frame.signal, frame.payload)
            peer.landed[DATA_CONNECTIONS] += 1
            peer.signals_due.notify()

    _until_lost(peer, take)


class FrameReader:
    """Reads frames from one connection. TransportError for a frame that no PE of this layout sends; none of its bytes
    are written. OSError where the connection ends.
    """

    def __init__(self, connection: socket.socket, memory: PageMemory, regions: Regions | None = None) -> None:
        """regions: what the pages here have in common with the sender's; None: they are alike."""
        self._regions: Regions = regions or [None] * len(memory.layout.groups)
        self._connection = connection
        self._memory = memory
        self._header = memoryview(bytearray(HEADER.size))
        largest = map(memory.layout.entry_bytes, range(len(memory.layout.groups)))
        self._staging = memoryview(bytearray(max(STAGED_BYTES, *largest)))

    def land_next(self) -> None:
        read_exactly(self._connection, self._header)
        header = read_header(bytes(self._header), self._memory.layout, self._regions)
        places = memoryview(bytearray(header.place_bytes))
        read_exactly(self._connection, places)
        numbers = np.frombuffer(places, "<i4")
        if header.kind == Kind.PAGES:
            for view in self._memory.page_views(header.group, numbers.reshape(-1, 2)):
                read_exactly(self._connection, view)
        else:
            self._memory.check_slots(header.group, numbers)
            self._land_staged(header, torch.from_numpy(numbers.astype(np.int64)))

    def _land_staged(self, header: Header, slots: Tensor) -> None:
        memory, layout = self._memory, self._memory.layout
        region = self._regions[header.group]
        staging = self._staging[: header.count * entry_bytes(layout, header.kind, header.group, region)]
        read_exactly(self._connection, staging)
        values = torch.frombuffer(staging, dtype=layout.stored_dtype_of(header.group))
        memory.put(header.kind, header.group, header.layer, slots, values, region)


def read_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fills the view, straight from the connection. ConnectionError where that has ended."""
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    while view:
        count = connection.recv_into(view, 0, flags)
        if not count:
            raise ConnectionResetError("it was closed by the peer")
        view = view[count:]


def _until_lost(peer: Peer, take: Callable[[], None]) -> None:
    try:
        while True:
            take()
    except PeerGone:
        pass
    except OSError as error:
        peer.fail(f"a connection from it is lost: {error}")
    except Exception as error:
        log.exception("PE %d's connections are ended", peer.pe)
        peer.fail(f"its connections were ended: {error}")
