"""The transport between hosts: connections over TCP, from which each PE fills its own pages.

    PE 0                                                                       PE 1
    write_slots ─► queues ─► 4 sending threads ═══ data connections ════════►  4 receiving threads ─► pages
    post ────────► queue ──► sending thread    ─── signal connection ───────►  receiving thread ────► mailbox
    fence ◄─────────────────  receiving thread ◄── PE 1's signal connection ─  sending thread: what has landed

A connection carries frames one way, and each of its ends belongs to one thread. Whole pages are sent straight from the
sender's pages and read straight into the receiver's. Slots and tokens are gathered into a copy, and sorted in there.

**Order.** Frames of one connection land in the order in which they were given to it. Frames of several connections do
not. A post carries how many frames were given to each data connection before it. The receiver counts the frames that
have landed from each, and applies the post when all counts are reached. So a reader that sees a signal sees all earlier
writes. A receiver tells its counts. A fence is quiet once they reach the counts at which it was made.

**Loss.** Where one connection to or from a peer ends, all of them do, for the rest of its epoch: writes, posts and
fences then raise PeerGone. Nothing is sent twice, and no signal passes frames that were lost.

**Epochs.** A connection begins with island, epoch, PE and a token from the handle, which each open() draws anew; with
certificates it is mutual TLS of the cluster's own authority. The listener closes when all have connected. close() ends
all connections, and returns when no thread writes into the pages any more. cut() does so with one peer's. An
offer to the process that takes the peer's place is another listener, with a token of its own.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from socket import socket

import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import plan_copy
from tandem.transfer.errors import TransportClosed, TransportError, TransportTimeout
from tandem.transfer.membership import Detail, TransportConfig, make_handle, read_handle, read_handles
from tandem.transfer.page_pool import movable, rows_for
from tandem.transfer.segment import TOKEN_BYTES
from tandem.transfer.tcp.connections import END_SECONDS, Listener, connect
from tandem.transfer.tcp.frames import (
    DATA_CONNECTIONS,
    Kind,
    entry_bytes,
    pages_frames,
    staged_count,
    staged_frame,
)
from tandem.transfer.tcp.hello import PROTOCOL, Hello
from tandem.transfer.tcp.memory import PageMemory, bytes_of
from tandem.transfer.tcp.peer import Counts, Peer
from tandem.transfer.tcp.receiving import receive_frames, receive_signals
from tandem.transfer.tcp.sending import Sender
from tandem.transfer.transport import Fence, Int64Array, QuietFence, Transport

NAME = "tcp"


class CountFence:
    """A fence after frames and posts that were given to a peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        with peer.lock:
            self.counts: Counts = tuple(peer.given)

    def is_quiet(self) -> bool:
        with self.peer.lock:
            if self.peer.is_over or self.peer.has_landed(self.counts):
                return True
            self.peer.check()
            return False


@dataclass(eq=False)
class Offer:
    """A place for another process, until it is admitted. sender: once it is reached."""

    peer: Peer
    listener: Listener
    sender: Sender | None = None

    def end(self) -> None:
        """Ends the offer. When it returns, no write of that process lands."""
        self.peer.end("its offer was taken back", END_SECONDS)
        self.listener.close()
        if self.sender is not None:
            self.sender.join()


class TcpTransport(Transport):
    """Pages are plain memory of this process; its endpoint's host is where the others reach it.

    ValueError for another host than loopback without certificates.
    """

    elastic = True

    def __init__(self, config: TransportConfig) -> None:
        super().__init__(config)
        if not config.endpoint.is_guarded:
            raise ValueError(
                f"endpoint.host is {config.endpoint.host!r}; without certificates it must be a loopback address"
            )
        self.silent_seconds = config.endpoint.silent_seconds
        self.quiet_seconds = max(self.quiet_seconds, self.silent_seconds)
        self._memory: PageMemory | None = None
        self._listeners: dict[int, Listener] = {}  # by peer; for those of the beginning it is that of the own PE
        self._offers: dict[int, Offer] = {}
        self._peers: dict[int, Peer] = {}
        self._senders: dict[int, Sender] = {}

    def open(self) -> bytes:
        if self._memory is not None:
            raise TransportError(f"PE {self.pe} is open already; open() is called once")
        memory = PageMemory(self.config)
        self._peers = {pe: Peer(pe) for pe in range(self.num_pes) if pe != self.pe}
        for pe in self.config.vacant:
            self._peers[pe].end("nobody has its place", 0)
        listener = self._listen(
            memory, memory.token, {pe: peer for pe, peer in self._peers.items() if not peer.is_over}
        )
        self._listeners[self.pe] = listener
        self._memory = memory
        return self._handle(listener, memory.token)

    def join(self, handles: Sequence[bytes]) -> None:
        """See Transport. Returns once every other PE has accepted this one's connections, joined or not."""
        if self._memory is None:
            raise TransportClosed(f"PE {self.pe} is not open; join() comes after open()")
        details = read_handles(NAME, self.config, handles)
        opened: dict[int, list[socket]] = {}
        try:
            for pe, peer in self._peers.items():
                opened[pe] = [] if peer.is_over else self._connections(peer, details[pe])
        except BaseException:
            for connections in opened.values():
                for connection in connections:
                    connection.close()
            raise
        self._senders = {pe: Sender(self._peers[pe], connections) for pe, connections in opened.items() if connections}
        self._joined = True

    def cut(self, pe: int) -> None:
        peer = self._peer_of(pe)
        peer.end("it was cut off", END_SECONDS)
        if pe in self._senders:
            self._senders[pe].join()
        self._listeners[self.pe].forget(pe)
        if pe in self._offers:
            self._offers.pop(pe).end()
        if pe in self._listeners:
            self._listeners.pop(pe).close()

    def offer(self, pe: int, epoch: int) -> bytes:
        memory, peer = self._own, Peer(pe)
        if not self._peer_of(pe).is_over:
            raise TransportError(f"PE {pe} is still there; cut() comes before offer()")
        if pe in self._offers:
            self._offers.pop(pe).end()
        self.config, token = self.config.renewed(pe, epoch), secrets.token_bytes(TOKEN_BYTES)
        self._offers[pe] = Offer(peer, self._listen(memory, token, {pe: peer}))
        return self._handle(self._offers[pe].listener, token)

    def reach(self, pe: int, handle: bytes) -> None:
        offer = self._offer_to(pe)
        offer.sender = Sender(offer.peer, self._connections(offer.peer, read_handle(NAME, self.config, pe, handle)))

    def admit(self, pe: int) -> None:
        offer = self._offer_to(pe)
        assert offer.sender is not None, "reach() comes first"
        del self._offers[pe]
        self._peers[pe], self._senders[pe], self._listeners[pe] = offer.peer, offer.sender, offer.listener

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self._own.tensors

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        own = self._own
        self._check_peer(pe)
        if not slots.shape[0]:
            return
        self._check_token_slots(group, slots)
        region = self._regions[pe][group]
        target = layer if region is None else region.peer_layer(layer)
        if target is None:
            return
        planes = [rows for rows in rows_for(k, v, token_indices, region) if rows is not None]
        if pe == self.pe:
            own.pools[group].put_tokens(layer, slots.long(), planes[0], planes[1] if v is not None else None)
            return
        most = staged_count(entry_bytes(self.layout, Kind.TOKENS, group, region))
        numbers = slots.to(torch.int32).numpy()
        parts = (slice(begin, begin + most) for begin in range(0, numbers.size, most))
        frames = (
            staged_frame(Kind.TOKENS, group, target, numbers[part], [bytes_of(movable(one[part])) for one in planes])
            for part in parts
        )
        self._sender(pe).give(frames, self.quiet_seconds)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        own = self._own
        self._check_peer(pe)
        plan = plan_copy(source_slots, target_slots, self.layout.paging[group].entries, self._num_slots(group))
        pool = own.pools[group]
        if pe == self.pe:
            pool.copy(pool, plan)
            return
        sender, region, single = self._sender(pe), self._regions[pe][group], (plan.source_slots, plan.target_slots)
        if region is None:
            sender.give(pages_frames(plan, group, self.layout.page_bytes(group), own.bytes[group]), self.quiet_seconds)
        elif region.is_empty:
            return
        else:  # no page of the one is a page of the other
            single = source_slots, target_slots
        most = staged_count(entry_bytes(self.layout, Kind.SLOTS, group, region))
        parts = (slice(begin, begin + most) for begin in range(0, single[0].size, most))
        frames = (
            staged_frame(
                Kind.SLOTS,
                group,
                0,
                single[1][part],
                [bytes_of(pool.read_slots(torch.from_numpy(single[0][part]).long(), region).contiguous())],
            )
            for part in parts
        )
        sender.give(frames, self.quiet_seconds)

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        return QuietFence() if pe == self.pe else CountFence(self._peers[pe])

    def quiet(self, pe: int) -> None:
        fence = self.fence(pe)
        if isinstance(fence, CountFence):
            peer, deadline = fence.peer, time.monotonic() + self.quiet_seconds
            with peer.lock:
                while not peer.is_over and not peer.has_landed(fence.counts):
                    peer.check()
                    if not peer.progress.wait(deadline - time.monotonic()):
                        raise TransportTimeout(
                            f"writes from PE {self.pe} to PE {pe} took more than {self.quiet_seconds:g} s; "
                            "they may still land"
                        )

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        own = self._own
        self._check_peer(pe)
        self._check_row(row)
        if pe == self.pe:
            own.post(row, signal, int(payload))
        else:
            self._sender(pe).post(row, signal, int(payload))

    def mailbox(self) -> Int64Array:
        return self._own.mailbox()

    @property
    def lost(self) -> str:
        losses = (self.loss(pe) for pe, peer in list(self._peers.items()) if not peer.is_over)
        return next(filter(None, losses), "") if self._joined else ""

    def loss(self, pe: int) -> str:
        peer = self._peers.get(pe)
        return f"PE {pe}: {peer.failure}" if peer is not None and peer.failure else ""

    def close(self) -> None:
        self._joined = False
        for peer in self._peers.values():
            peer.fail("this PE has left the island")
        for offer in self._offers.values():
            offer.end()
        for listener in self._listeners.values():
            listener.close()
        for sender in self._senders.values():
            sender.join()
        self._offers, self._listeners, self._senders, self._peers, self._memory = {}, {}, {}, {}, None

    @property
    def _own(self) -> PageMemory:
        self._check_peer(self.pe)
        assert self._memory is not None, "joined"
        return self._memory

    def _peer_of(self, pe: int) -> Peer:
        self._check_peer(pe)
        if pe == self.pe:
            raise InvalidArgument(f"pe is {pe}, this PE itself; it must be another one from 0 to {self.num_pes - 1}")
        return self._peers[pe]

    def _offer_to(self, pe: int) -> Offer:
        """Returns an offer. TransportError where there is none, or none any more."""
        if (offer := self._offers.get(pe)) is None:
            raise TransportError(f"PE {pe} has no offer of PE {self.pe}: it was taken back, or was never made")
        return offer

    def _sender(self, pe: int) -> Sender:
        """Returns a sender. PeerGone where nobody has the PE's place."""
        if pe not in self._senders:
            with self._peers[pe].lock:
                self._peers[pe].check()
        return self._senders[pe]

    def _listen(self, memory: PageMemory, token: bytes, peers: dict[int, Peer]) -> Listener:
        return Listener(self.config, token, partial(_receive, peers, memory), peers)

    def _handle(self, listener: Listener, token: bytes) -> bytes:
        host, port = listener.address
        return make_handle(NAME, self.config, {"host": host, "port": port, "token": token.hex()})

    def _connections(self, peer: Peer, detail: Detail) -> list[socket]:
        """Opens all connections to one peer. On an error none is left."""
        opened: list[socket] = []
        try:
            for number in range(DATA_CONNECTIONS + 1):
                opened.append(self._connect(peer.pe, number, detail))
                peer.adopt(opened[-1])
        except BaseException:
            for connection in opened:
                connection.close()
            raise
        return opened

    def _connect(self, pe: int, number: int, detail: Detail) -> socket:
        host, port, token = detail.get("host"), detail.get("port"), detail.get("token")
        if not isinstance(host, str) or not isinstance(port, int) or not isinstance(token, str):
            raise TransportError(f"PE {pe}'s handle has detail {detail}; it must have host, port and token")
        hello = Hello(PROTOCOL, self.config.island, self.config.all_epochs[pe], self.pe, pe, number, token)
        return connect(self.config.endpoint, (host, port), hello)


def _receive(peers: dict[int, Peer], memory: PageMemory, pe: int, number: int, connection: socket) -> None:
    """See Receive. PeerGone for one that comes after the peer was lost."""
    with peers[pe].receiving(connection):
        if number == DATA_CONNECTIONS:
            receive_signals(connection, peers[pe], memory)
        else:
            receive_frames(connection, peers[pe], number, memory)
