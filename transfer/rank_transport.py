"""The transport of one rank, where workers of an island have several: PEs are workers here, ranks are PEs below.

A rank writes to those ranks of a peer that hold heads which it has, and posts a signal to each of them, behind what it
wrote there. So a row of a mailbox is `lanes` rows below, one for each rank that may write to this one. Each signal word
says how many ranks write to the receiver, in bits that tokens do not need; their lanes come first.

    worker 0, rank 0 ═══ heads 0 … 3 ═══► worker 1, rank 0      lane 0 of 1
                     ═══ heads 4 … 7 ═══► worker 1, rank 1      lane 0 of 1

Rows behind those of signals, of recalls, are the first ranks' alone, and are as they were.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.stored_layers import Stages
from tandem.transfer.completion import TOKEN_BITS
from tandem.transfer.island_ranks import MAX_RANKS, IslandRanks
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.regions import Regions, regions_between
from tandem.transfer.transport import Fence, Transport

COUNT_BITS = (MAX_RANKS - 1).bit_length()
COUNT_SHIFT = TOKEN_BITS - COUNT_BITS  # 2³⁴ tokens are enough
COUNT_MASK = ((1 << COUNT_BITS) - 1) << COUNT_SHIFT


class Writers:
    """Who writes to whom between ranks of two workers. layouts: of a worker's ranks, in order."""

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
    """One rank's end. It owns `below`, whose PEs are all ranks of all workers, one worker behind the other."""

    def __init__(self, below: Transport, workers: Sequence[Sequence[KVLayout]], worker: int, num_signals: int) -> None:
        """workers: the layouts of each worker's ranks. num_signals: rows of a mailbox, as workers count them."""
        firsts = IslandRanks(map(len, workers)).leaders
        self.rank = below.pe - firsts[worker]
        self._below, self._firsts = below, firsts
        self._lanes = lanes_of(workers)
        of_sizes = {size: Writers(workers[worker], peers) for size, peers in _by_size(workers).items()}
        writers = [of_sizes[len(peers)] for peers in workers]
        own = replace(below.config, pe=worker, num_pes=len(workers), num_signals=num_signals, layouts=())
        super().__init__(own)
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
        self._below.join(handles)
        self._joined = True

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self._below.pools

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._check_peer(pe)
        for rank in self._targets[pe][group]:
            self._below.write_tokens(self._firsts[pe] + rank, group, layer, k, v, token_indices, slots)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._check_peer(pe)
        for rank in self._targets[pe][group]:
            self._below.write_slots(self._firsts[pe] + rank, group, source_slots, target_slots, stages)

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        """That of the one rank which is written, if there is one: kernels store into one pool."""
        targets = self._targets[pe][group]
        return self._below.peer_pool(self._firsts[pe] + targets[0], group) if len(targets) == 1 else None

    def rank_scratch(self, rank: int) -> int | None:
        """Transport.scratch of a rank of this worker."""
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

    @property
    def silent_seconds(self) -> float:  # type: ignore[override]
        return self._below.silent_seconds

    def close(self) -> None:
        self._joined = False
        self._below.close()


class _Fences:
    def __init__(self, fences: list[Fence]) -> None:
        self._fences = fences

    def is_quiet(self) -> bool:
        while self._fences and self._fences[-1].is_quiet():
            self._fences.pop()
        return not self._fences


def lanes_of(workers: Sequence[Sequence[KVLayout]]) -> int:
    """How many ranks may write to one rank, at most."""
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
    pe = IslandRanks(map(len, workers)).process(config.pe, rank)
    num_signals = signals * lanes_of(workers) + mailbox_rows(0, config.num_pes)
    counts = {"pe": pe, "num_pes": len(layouts), "num_signals": num_signals}
    return replace(config, **counts, layouts=layouts, scratch_bytes=scratch_bytes)
