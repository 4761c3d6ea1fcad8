"""The transport of one rank, where workers of an island have several: PEs are workers here, ranks are PEs below.

A rank writes to the ranks of a peer that hold heads which it has. After its writes it posts a signal to each. So a row
of a mailbox is `lanes` rows below, one for each rank that may write to this rank. Each signal word has the number of
ranks that write to the receiver, in bits that tokens do not need. Their lanes come first.

    worker 0, rank 0 ═══ heads 0 … 3 ═══► worker 1, rank 0      lane 0 of 1
                     ═══ heads 4 … 7 ═══► worker 1, rank 1      lane 0 of 1

The rows of recalls, after the rows of signals, belong to the first ranks alone, and are not divided.

If the transport below is elastic, so is this one. An offer then has a handle for each rank of the peer: see bundle().
Ranks notice the loss of a peer at different times, but must make the same calls with the same results. So writes and
posts to a lost peer are dropped without an error. The leader hears of the loss by loss(), or when the peer is cut.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.completion import TOKEN_BITS
from tandem.transfer.errors import MembershipRefused, PeerGone
from tandem.transfer.island_ranks import MAX_RANKS, IslandRanks
from tandem.transfer.membership import TransportConfig, bundle, unbundle
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.regions import Regions, regions_between
from tandem.transfer.transport import Fence, Transport

COUNT_BITS = (MAX_RANKS - 1).bit_length()
COUNT_SHIFT = TOKEN_BITS - COUNT_BITS  # 2³⁴ tokens are enough
COUNT_MASK = ((1 << COUNT_BITS) - 1) << COUNT_SHIFT


class Writers:
    """Finds the ranks of one worker that write to each rank of another. layouts: of a worker's ranks, in order."""

    def __init__(self, own: Sequence[KVLayout], peer: Sequence[KVLayout]) -> None:
        self._regions: list[list[Regions]] = [[regions_between(mine, theirs) for theirs in peer] for mine in own]
        self._own = own

    def targets(self, rank: int, group: int) -> list[int]:
        """The peer's ranks to which `rank` writes of a layer group. Ranks that hold the same heads take turns."""
        kind, size = self._own[rank].groups[group].kind, len(self._own)
        replicas = size if kind.whole_on_ranks else kind.replicas
        found = []
        for peer, regions in enumerate(self._regions[rank]):
            region = regions[group]
            has_some = region is None or not region.is_empty
            if has_some and peer % replicas == rank % replicas:
                found.append(peer)
        return found

    def sources(self, peer: int) -> list[int]:
        """The ranks that write to the peer's rank."""
        groups = range(len(self._own[0].groups))
        return [rank for rank in range(len(self._own)) if any(peer in self.targets(rank, group) for group in groups)]


class RankTransport(Transport):
    """One rank's end. It owns `below`, whose PEs are all ranks of all workers, one worker after the other."""

    def __init__(self, below: Transport, workers: Sequence[Sequence[KVLayout]], worker: int, num_signals: int) -> None:
        """workers: the layouts of each worker's ranks. num_signals: rows of a mailbox, as workers count them."""
        firsts = IslandRanks(map(len, workers)).leaders
        self.rank = below.pe - firsts[worker]
        self._below, self._firsts = below, firsts
        self._lanes = lanes_of(workers)
        of_sizes = {size: Writers(workers[worker], peers) for size, peers in _by_size(workers).items()}
        writers = [of_sizes[len(peers)] for peers in workers]
        epochs = tuple(below.config.epochs[first] for first in firsts) if below.config.epochs else ()
        counts = {"pe": worker, "num_pes": len(workers), "num_signals": num_signals, "epochs": epochs}
        super().__init__(replace(below.config, **counts, layouts=()))
        self.elastic = below.elastic
        self._dropped = (PeerGone,) if below.elastic else ()
        self._sizes = IslandRanks(map(len, workers))
        self.layouts = tuple(ranks[0] for ranks in workers)
        groups = range(len(self.layout.groups))
        self._targets = [[one.targets(self.rank, group) for group in groups] for one in writers]
        self._any = [sorted({peer for peers in groups for peer in peers}) for groups in self._targets]
        self._lane_of: list[dict[int, tuple[int, int]]] = []  # of each worker: lane and number of writers at its ranks
        for one, peers in zip(writers, self._any, strict=True):
            sources = {peer: one.sources(peer) for peer in peers}
            self._lane_of.append({peer: (ranks.index(self.rank), len(ranks)) for peer, ranks in sources.items()})
        self._rows = num_signals - 2 * len(workers)  # those of signals

    def open(self) -> bytes:
        return self._below.open()

    def join(self, handles: Sequence[bytes]) -> None:
        """handles: of all ranks of all workers. A peer that has made an offer has one for each rank of this worker."""
        self._below.join([self._own_part(handle) for handle in handles])
        self._joined = True

    def cut(self, pe: int) -> None:
        for rank in self._ranks_below(pe):
            self._below.cut(rank)

    def offer(self, pe: int, epoch: int) -> bytes:
        offers = [self._below.offer(rank, epoch) for rank in self._ranks_below(pe)]
        self.config = self.config.renewed(pe, epoch)
        return bundle(offers)

    def reach(self, pe: int, handle: bytes) -> None:
        ranks, parts = self._ranks_below(pe), unbundle(handle)
        if len(parts) != len(ranks):
            raise MembershipRefused(f"PE {pe}'s handle is of {len(parts)} ranks; {len(ranks)} are expected here")
        for rank, part in zip(ranks, parts, strict=True):
            self._below.reach(rank, part)

    def admit(self, pe: int) -> None:
        for rank in self._ranks_below(pe):
            self._below.admit(rank)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self._below.pools

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        for rank in self._targets[pe][group]:
            with suppress(*self._dropped):
                self._below.write_tokens(self._firsts[pe] + rank, group, layer, k, v, token_indices, slots)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_peer(pe)
        for rank in self._targets[pe][group]:
            with suppress(*self._dropped):
                self._below.write_slots(self._firsts[pe] + rank, group, source_slots, target_slots, stages)

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """Returns the pool of the one rank that is written, if there is only one: kernels store into one pool."""
        targets = self._targets[pe][group]
        return self._below.peer_pool(self._firsts[pe] + targets[0], group) if len(targets) == 1 else None

    def rank_scratch(self, rank: int) -> int | None:
        """Returns Transport.scratch of a rank of this worker."""
        return self._below.scratch(self._firsts[self.pe] + rank)

    def fence(self, pe: int) -> Fence:
        self._check_peer(pe)
        return _Fences([self._below.fence(self._firsts[pe] + rank) for rank in self._any[pe]])

    def post(self, pe: int, row: int, signal: int, payload: int | Tensor) -> None:
        self._check_peer(pe)
        self._check_row(row)
        if row >= self._rows:
            self._below.post(self._firsts[pe], self._rows * self._lanes + row - self._rows, signal, payload)
            return
        for rank, (lane, count) in self._lane_of[pe].items():
            word = signal | (count - 1) << COUNT_SHIFT
            with suppress(*self._dropped):
                self._below.post(self._firsts[pe] + rank, row * self._lanes + lane, word, payload)

    def mailbox(self) -> Int64Array:
        """A row of signals has its word once each rank that writes here has posted it, else 0."""
        rows, lanes = self._rows, self._lanes
        below = self._below.mailbox()
        of_lanes = below[: rows * lanes].reshape(rows, lanes, 2)
        words = of_lanes[:, 0, 0]
        counts = (words & COUNT_MASK) >> COUNT_SHIFT
        same = (of_lanes[:, :, 0] == words[:, None]) | (np.arange(lanes) > counts[:, None])
        found = np.empty((self.num_signals, 2), np.int64)
        found[:rows, 0] = np.where(same.all(1), words & ~COUNT_MASK, 0)
        found[:rows, 1] = of_lanes[:, 0, 1]
        found[rows:] = below[rows * lanes :]
        return found

    @property
    def lost(self) -> str:
        return self._below.lost

    def loss(self, pe: int) -> str:
        return next(filter(None, (self._below.loss(rank) for rank in self._ranks_below(pe))), "")

    @property
    def silent_seconds(self) -> float:  # type: ignore[override]
        return self._below.silent_seconds

    def close(self) -> None:
        self._joined = False
        self._below.close()

    def _ranks_below(self, pe: int) -> range:
        self._check_peer(pe)
        return range(self._firsts[pe], self._firsts[pe] + self._sizes[pe])

    def _own_part(self, handle: bytes) -> bytes:
        parts = unbundle(handle)
        return parts[self.rank] if len(parts) > 1 else handle


class _Fences:
    def __init__(self, fences: list[Fence]) -> None:
        self._fences = fences

    def is_quiet(self) -> bool:
        while self._fences and self._fences[-1].is_quiet():
            self._fences.pop()
        return not self._fences


def lanes_of(workers: Sequence[Sequence[KVLayout]]) -> int:
    """Returns the most ranks that may write to one rank."""
    shapes = _by_size(workers).values()
    pairs = [(Writers(own, peers), len(peers)) for own in shapes for peers in shapes]
    return max(len(writers.sources(rank)) for writers, size in pairs for rank in range(size))


def _by_size(workers: Sequence[Sequence[KVLayout]]) -> dict[int, Sequence[KVLayout]]:
    """The layouts of one worker of each number of ranks: others of that number have the same."""
    return {len(ranks): ranks for ranks in workers}


def config_below(
    config: TransportConfig, workers: Sequence[Sequence[KVLayout]], rank: int, scratch_bytes: int = 0
) -> TransportConfig:
    """config: as workers count PEs and rows. The same island, as its ranks do. scratch_bytes: of each rank."""
    layouts = tuple(layout for ranks in workers for layout in ranks)
    signals = config.num_signals - mailbox_rows(0, config.num_pes)
    sizes = IslandRanks(map(len, workers))
    num_signals = signals * lanes_of(workers) + mailbox_rows(0, config.num_pes)
    epochs = tuple(epoch for pe, epoch in enumerate(config.epochs) for _ in range(sizes[pe]))
    pe = sizes.process(config.pe, rank)
    counts = {"pe": pe, "num_pes": len(layouts), "num_signals": num_signals, "epochs": epochs}
    return replace(config, **counts, layouts=layouts, scratch_bytes=scratch_bytes)
