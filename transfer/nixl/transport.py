"""The transport between hosts with RDMA, or over TCP: pages are written by NIXL, whose backend is UCX.

    PE 0                                                                     PE 1
    write_slots  ─► whole pages, a span a run ═══════ one-sided writes ════► pages
    write_slots, ─► copy in a ring ══════════════════ one-sided writes ════► ring ──┐
    write_tokens        └► note, once it is there ── ─ ─ messages ─ ─ ─ ──► thread ─┴─► pages
    post         ─► note, once all before it is done ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─► thread ───► mailbox
    fence        ◄─ writes done, notes landed  ◄ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ── thread

One thread a PE talks to NIXL (`Exchange`). The step thread gives it items, and never waits for a device or the network
but for a free slot of a ring. Slots and tokens are many short rows: a span a row costs 15 µs, so that they travel as
copies, which the receiver's thread sorts in. No memory of a peer is mapped.

**Order.** Notes are sent in the order of their items, each when all writes before it are done. NIXL calls a write done
when the peer sees its bytes. Notes are numbered, and one out of order ends the connection. The receiver's thread puts
posts into the mailbox, and says how many notes have landed. A fence is quiet once its writes are done, and its notes
have landed.

**GPUs.** Pools are then on the GPU, and an item waits for an event of the stream that computes it. A first token is
copied to the host on that stream, and the thread reads it once its event has come. No GPU has run this yet.

**Peers.** Each peer has an agent of its own (`Link`), so that cut() can end all that this peer may do.

**Loss.** A peer is lost when NIXL says so, when a write takes too long, or when the peer is silent for longer than its
endpoint allows. It stays so for the rest of its epoch: writes, posts and fences raise PeerGone.

**Epochs.** An agent's name has a token that each open() draws anew, and notes of other names are ignored. close() ends
the thread with its writes, takes the memory back from NIXL, and ends all connections with the agent. UCX encrypts
nothing and asks nobody for a certificate: see docs/security.md.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from nixl import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.copy_plan import CopyPlan, plan_copy
from tandem.transfer.errors import TransportClosed, TransportError, TransportTimeout
from tandem.transfer.membership import Detail, TransportConfig, make_handle, read_handle, read_handles
from tandem.transfer.nixl.devices import settings
from tandem.transfer.nixl.exchange import Exchange
from tandem.transfer.nixl.link import Link, Remote
from tandem.transfer.nixl.memory import NixlMemory
from tandem.transfer.nixl.peer import SLOTS, Item, Kind, NixlFence, Note, Peer, Spans
from tandem.transfer.page_pool import movable, rows_for
from tandem.transfer.segment import TOKEN_BYTES
from tandem.transfer.tcp.frames import Kind as Staged
from tandem.transfer.transport import Fence, Int64Array, QuietFence, Transport

NAME = "nixl"
WRITE_BYTES = 8 << 20  # of pages; longer pushes are cut, so that other peers have their turn
STAGE_BYTES = 64 << 10  # layers of a page from which it pays to send the first layers apart
SILENT_SECONDS = 3.0  # a peer is not lost sooner: signs of life come once a second


class NixlTransport(Transport):
    """A transport over NIXL. Of the endpoint only host and silent_seconds count: UCX listens on the interface of that
    address.

    join() returns before peers answer: one whose process has ended is found lost soon after.
    """

    elastic = True

    def __init__(self, config: TransportConfig) -> None:
        super().__init__(config)
        self.silent_seconds = config.endpoint.silent_seconds
        self.quiet_seconds = max(self.quiet_seconds, self.silent_seconds)
        self._memory: NixlMemory | None = None
        self._peers: dict[int, Peer] = {}
        self._links: dict[int, Link] = {}
        self._offers: dict[int, Link] = {}
        self._exchange: Exchange | None = None

    def open(self) -> bytes:
        if self._memory is not None:
            raise TransportError(f"PE {self.pe} is open already; open() is called once")
        memory = NixlMemory(self.config)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else it writes to stdout
        for name, value in settings(self.config.endpoint, cuda=memory.device is not None).items():
            os.environ.setdefault(name, value)  # UCX reads them when a backend is made
        self._peers = {pe: Peer(pe) for pe in range(self.num_pes) if pe != self.pe}
        for pe in self.config.vacant:
            self._peers[pe].end("nobody has its place")
        name = self._name(memory.token)
        peers = (peer for peer in self._peers.values() if not peer.is_over)
        self._links = {peer.pe: Link(peer, name, memory, _make_agent) for peer in peers}
        self._memory = memory
        return self._handle(memory, name, self._links)

    def join(self, handles: Sequence[bytes]) -> None:
        memory = self._memory
        if memory is None:
            raise TransportClosed(f"PE {self.pe} is not open; join() comes after open()")
        details = read_handles(NAME, self.config, handles)
        remotes = {pe: Remote(pe, self.pe, details[pe], len(memory.pools)) for pe in self._links}
        for pe, link in self._links.items():
            link.connect(remotes[pe])
        self._exchange = Exchange(memory, self.quiet_seconds, max(self.silent_seconds, SILENT_SECONDS))
        for link in self._links.values():
            self._exchange.add(link)
        self._joined = True

    def cut(self, pe: int) -> None:
        peer = self._peer_of(pe)
        if pe in self._links:
            self._running.cut(self._links[pe], "it was cut off")
        if pe in self._offers:
            self._end_offer(pe)
        peer.end("it was cut off")

    def offer(self, pe: int, epoch: int) -> bytes:
        memory = self._own
        if not self._peer_of(pe).is_over:
            raise TransportError(f"PE {pe} is still there; cut() comes before offer()")
        if pe in self._offers:
            self._end_offer(pe)
        self.config, name = self.config.renewed(pe, epoch), self._name(secrets.token_bytes(TOKEN_BYTES))
        self._offers[pe] = Link(Peer(pe), name, memory, _make_agent)
        return self._handle(memory, name, {pe: self._offers[pe]})

    def reach(self, pe: int, handle: bytes) -> None:
        detail, link = read_handle(NAME, self.config, pe, handle), self._offer_to(pe)
        link.connect(Remote(pe, self.pe, detail, len(self._own.pools)))
        self._running.add(link)

    def admit(self, pe: int) -> None:
        link = self._offer_to(pe)
        assert link.remote is not None, "reach() comes first"
        del self._offers[pe]
        self._peers[pe], self._links[pe] = link.peer, link

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
        tokens = token_indices if own.device is None else token_indices.to(own.device)
        planes = [rows for rows in rows_for(k, v, tokens, region) if rows is not None]
        if pe == self.pe:
            own.pools[group].put_tokens(
                layer, slots.long().to(k.device), planes[0], planes[1] if v is not None else None
            )
            return
        most, places = own.count_of(Staged.TOKENS, group, region), slots.to(torch.int32).numpy()
        for begin in range(0, places.size, most):
            part = slice(begin, begin + most)
            self._stage(pe, Staged.TOKENS, group, target, places[part], [movable(one[part]) for one in planes])

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        own = self._own
        self._check_peer(pe)
        plan = plan_copy(source_slots, target_slots, self.layout.paging[group].entries, self._num_slots(group))
        pool, region = own.pools[group], self._regions[pe][group]
        if pe == self.pe:
            pool.copy(pool, plan)
            return
        single = plan.source_slots, plan.target_slots
        if region is None:
            self._write_pages(pe, group, plan, stages)
        elif region.is_empty:
            return
        else:  # no page of the one is a page of the other
            single = source_slots, target_slots
        most = own.count_of(Staged.SLOTS, group, region)
        for begin in range(0, single[0].size, most):
            part = slice(begin, begin + most)
            slots = torch.from_numpy(single[0][part]).long()
            rows = pool.read_slots(slots if own.device is None else slots.to(own.device), region).contiguous()
            self._stage(pe, Staged.SLOTS, group, 0, single[1][part], [rows])

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        return QuietFence() if pe == self.pe else NixlFence(self._peers[pe])

    def quiet(self, pe: int) -> None:
        fence = self.fence(pe)
        if isinstance(fence, NixlFence):
            peer, deadline = fence.peer, time.monotonic() + self.quiet_seconds
            with peer.lock:
                while not fence.has_landed():
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
            return
        word, ready = payload, None
        if isinstance(payload, Tensor) and payload.is_cuda:
            word = torch.empty((), dtype=torch.int64, pin_memory=True)
            word.copy_(payload, non_blocking=True)
            ready = self._mark()
        elif isinstance(payload, Tensor):
            word = int(payload)
        self._give(pe, Item(ready, note=Note(Kind.POST, row, signal, word)))

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
        if self._exchange is not None:
            self._exchange.close()
        for link in (*self._links.values(), *self._offers.values()):
            link.end()
        for peer in self._peers.values():
            peer.fail("this PE has left the island")
        self._exchange, self._memory = None, None
        self._links, self._offers, self._peers = {}, {}, {}

    @property
    def _running(self) -> Exchange:
        assert self._exchange is not None, "joined"
        return self._exchange

    def _peer_of(self, pe: int) -> Peer:
        self._check_peer(pe)
        if pe == self.pe:
            raise InvalidArgument(f"pe is {pe}, this PE itself; it must be another one from 0 to {self.num_pes - 1}")
        return self._peers[pe]

    def _remote(self, pe: int) -> Remote:
        """Returns the peer's addresses. PeerGone where nobody has its place."""
        peer = self._peers[pe]
        with peer.lock:
            peer.check()
        remote = self._links[pe].remote
        assert remote is not None, "joined"
        return remote

    def _offer_to(self, pe: int) -> Link:
        """Returns the link of an offer. TransportError where there is none."""
        if (link := self._offers.get(pe)) is None:
            raise TransportError(f"PE {pe} has no offer of PE {self.pe}: it was taken back, or was never made")
        return link

    def _end_offer(self, pe: int) -> None:
        link = self._offers.pop(pe)
        if link.remote is None:
            link.end()
        else:
            self._running.cut(link, "its offer was taken back")

    def _name(self, token: bytes) -> str:
        """Names this PE's agents. Nobody can guess the name."""
        return f"{self.config.island}-{self.epoch}-{self.pe}-{token.hex()}"

    def _handle(self, memory: NixlMemory, name: str, links: Mapping[int, Link]) -> bytes:
        """Makes the handle for the peers of these links."""
        detail: Detail = {
            "name": name,
            "metadata": ",".join(links[pe].metadata if pe in links else "" for pe in range(self.num_pes)),
            "memory": memory.kind,
            "device": memory.device_index,
            "pools": ",".join(str(pool.data_ptr()) for pool in memory.tensors),
            "inbox": memory.inbox.data_ptr(),
            "slot_bytes": memory.slot_bytes,
        }
        return make_handle(NAME, self.config, detail)

    @property
    def _own(self) -> NixlMemory:
        self._check_peer(self.pe)
        assert self._memory is not None, "joined"
        return self._memory

    def _write_pages(self, pe: int, group: int, plan: CopyPlan, stages: Stages) -> None:
        """The whole pages of a plan, straight from the own pool; with stages its first layers as they are stored."""
        own, remote, size = self._own, self._remote(pe), self.layout.page_bytes(group)
        layers = len(self.layout.groups[group].layers)
        source, target = _spans(plan, own.tensors[group].data_ptr(), remote.pools[group], size)
        if len(stages) < 2 or size < STAGE_BYTES * len(stages):
            self._write(pe, source, target, stages[-1][1] if stages else self._mark())
            return
        source, target = (_cut(one, size) for one in (source, target))
        done = 0
        for num_layers, event in stages:
            begin, end = done * size // layers, num_layers * size // layers
            parts = [one + np.array([begin, end - begin - size], np.int64) for one in (source, target)]
            self._write(pe, parts[0], parts[1], event)
            done = num_layers

    def _write(self, pe: int, source: np.ndarray, target: np.ndarray, ready: "torch.cuda.Event | None") -> None:
        """source, target: int64 [n, 2], address and bytes."""
        own, remote = self._own, self._remote(pe)
        number = np.cumsum(source[:, 1]) // WRITE_BYTES
        edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(source)]
        mine = np.insert(source, 2, own.device_index, axis=1).astype(np.uint64)
        theirs = np.insert(target, 2, remote.device, axis=1).astype(np.uint64)
        for begin, end in pairwise(edges):
            if begin < end:
                of_own, of_peer = Spans(own.kind, mine[begin:end]), Spans(remote.memory, theirs[begin:end])
                self._give(pe, Item(ready, of_own, of_peer))

    def _stage(
        self, pe: int, kind: Staged, group: int, layer: int, places: Int32Array, planes: Sequence[Tensor]
    ) -> None:
        own, remote = self._own, self._remote(pe)
        slot = self._peers[pe].free_slot(self.quiet_seconds)
        size = own.stage(pe, slot, kind, group, layer, places, planes)
        begin = remote.inbox + (self.pe * SLOTS + slot) * remote.slot_bytes
        target = Spans("DRAM", np.array([[begin, size, 0]], np.uint64))
        note = Note(Kind.STAGED, slot, 0, size)
        self._give(pe, Item(self._mark(), own.slot_span(pe, slot, size), target, note))

    def _mark(self) -> "torch.cuda.Event | None":
        """Records an event after the current stream of a GPU."""
        if self._own.device is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _give(self, pe: int, item: Item) -> None:
        self._peers[pe].give(item)
        self._running.wake()


def _make_agent(name: str) -> Any:
    """Makes an agent without NIXL's own thread, which never sleeps."""
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False))


def _spans(plan: CopyPlan, source: int, target: int, page_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns address and bytes of each run of pages, int64 [n, 2], none longer than WRITE_BYTES unless a page is."""
    most = max(1, WRITE_BYTES // page_bytes)
    counts = plan.num_pages.astype(np.int64)
    pieces = -(-counts // most)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its run
    length = np.minimum(np.repeat(counts, pieces) - number * most, most) * page_bytes
    sides = []
    for base, pages in ((source, plan.source_pages), (target, plan.target_pages)):
        first = np.repeat(pages.astype(np.int64), pieces) + number * most
        sides.append(np.stack([base + first * page_bytes, length], axis=1))
    return sides[0], sides[1]


def _cut(spans: np.ndarray, page_bytes: int) -> np.ndarray:
    """Cuts spans into one for each page."""
    pages = spans[:, 1] // page_bytes
    number = np.arange(pages.sum()) - np.repeat(np.cumsum(pages) - pages, pages)
    address = np.repeat(spans[:, 0], pages) + number * page_bytes
    return np.stack([address, np.full_like(address, page_bytes)], axis=1)
