"""Ranks of a worker whose peer is lost, and whose place another process takes: each rank hears of it by itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.errors import PeerGone
from tandem.transfer.recall import mailbox_rows
from tandem.workers.engine.admission import Admission
from tests.protocol.rank_world import PAGES, RANKS, SIGNALS, Event, Quiet, Rank, RankWorld
from tests.protocol.small_island import PREFILL
from tests.protocol.token_memory import TokenMemory
from tests.protocol.wires import Endpoint, WireTransport
from tests.support.prompt_specs import spec_of

EPOCH = 2  # of the process that takes the place


class DroppingWires(WireTransport):
    """Wires of a RankTransport: what goes to a lost peer is dropped."""

    is_lost = False

    def _check_there(self) -> None:
        super()._check_there()
        if self.is_lost:
            raise PeerGone("the connection has ended")

    def write_slots(self, *arguments: Any, **named: Any) -> None:
        with suppress(PeerGone):
            super().write_slots(*arguments, **named)


@dataclass(eq=False)
class PeerFence(Quiet):
    """A fence to the process that is lost. It is quiet once the process is cut."""

    rank: "RankWithPeers | None" = None

    def is_quiet(self) -> bool:
        assert self.rank is not None, "a fence is of a rank"
        if self.rank.has_cut:
            return True
        if self.rank.transport.is_lost:
            raise PeerGone("the connection has ended")
        return self.is_so


@dataclass(eq=False)
class RankWithPeers(Rank):
    """successor: the process that takes the place of the peer."""

    wires: type[WireTransport] = DroppingWires
    has_cut: bool = False
    has_reached: bool = False
    successor: Endpoint = field(
        default_factory=lambda: Endpoint(
            TokenMemory("the successor", PAGES, []), np.zeros((mailbox_rows(SIGNALS, 2), 2), np.int64)
        )
    )
    transport: Any = None

    def cut(self) -> None:
        self.transport.cut(PREFILL)
        self.has_cut = True

    def reach(self) -> None:
        self.transport.reach_endpoint(self.successor)
        self.has_reached = True

    def _fence(self, pe: int) -> Quiet:
        self.fences.append(PeerFence(rank=self))
        return self.fences[-1]


class WorldOfPeers(RankWorld):
    """The leader pushes a sequence, parts with the peer, admits another, and pushes a second sequence there. The
    supervisor asks it for either once all ranks have cut the peer, or have reached the other."""

    polls = 6, 7, 9
    ranks: Sequence[RankWithPeers]

    def _make_ranks(self) -> Sequence[RankWithPeers]:
        return [RankWithPeers(number) for number in range(RANKS)]

    def _make_program(self) -> list[Callable[[], object]]:
        self._parted = False
        engine, admission = self.engine, Admission(spec_of([1, 2]), PAGES, 1, shares=False)
        maps = dict[int, PositionMap]()

        def expect(sequence: int) -> None:
            maps[sequence] = engine.expect(sequence, PAGES)

        def pushed(sequence: int) -> list[Callable[[], object]]:
            return [
                lambda: engine.admit(sequence, admission),
                lambda: expect(sequence),
                lambda: engine.received(sequence),
                lambda: engine.mark_send(sequence, 0, maps[sequence], PREFILL),
                lambda: engine.push(sequence),
            ]

        return [
            *pushed(1),
            self._make_fence,
            self._part,
            self._sees_fence,
            lambda: engine.free(1),
            self._welcome,
            *pushed(2),
            lambda: engine.free(2),
            self.leader.close,
        ]

    def events(self) -> Iterator[Event]:
        yield from super().events()
        for rank in self.ranks:
            if not rank.alive:
                continue
            if not rank.transport.is_lost and not rank.has_cut:
                yield "loses its peer", rank.number
            if not rank.has_cut:
                yield "cuts", rank.number
            if self._parted and not rank.has_reached:
                yield "reaches", rank.number

    def act(self, event: Event) -> None:
        name, number = event
        rank = self.ranks[number]
        match name:
            case "loses its peer":
                rank.transport.is_lost = True
            case "cuts":
                rank.cut()
            case "reaches":
                rank.transport.is_lost = False
                rank.reach()
            case _:
                super().act(event)
                return
        if number and not self.followers[number - 1].lost:
            self._publish(number)
        self._check()

    def _lead(self) -> None:
        try:
            super()._lead()
        except PeerGone as error:
            self.findings.append(f"an action of the leader raises PeerGone: {error}")

    def _publish(self, number: int) -> None:
        try:
            self.followers[number - 1]._publish()
        except Exception as error:
            self.findings.append(f"rank {number} cannot follow: {error}")
            self.followers[number - 1].give_up(str(error))

    def _part(self) -> bool:
        if not self._parted and all(rank.has_cut for rank in self.ranks):
            self.engine.part(PREFILL)
            self._parted = True
        return self._parted

    def _welcome(self) -> bool:
        is_there = all(rank.has_reached for rank in self.ranks)
        if is_there and self.engine.peers.epochs[PREFILL] != EPOCH:
            self.engine.welcome(PREFILL, EPOCH)
        return is_there

    def _sees_fence(self) -> bool:
        with suppress(PeerGone):
            seen = self._fence.is_quiet()
            self._need("a fence", seen, all(rank.has_cut or rank.fences[0].is_so for rank in self.ranks))
            return seen
        return False

    def _check(self) -> None:
        super()._check()
        due = int(self.at > self._program.index(self._welcome) + 5)
        for rank in self.ranks:
            if len(rank.successor.written()) > due:
                self.findings.append(f"rank {rank.number} writes to the successor of a peer what was for that peer")

    def come_to_an_end(self) -> None:
        super().come_to_an_end()
        if not self.findings and not self.has_loss and self.ranks[0].alive:
            counts = [len(rank.successor.written()) for rank in self.ranks]
            if counts != [1] * RANKS:
                self.findings.append(f"the successor gets {counts} writes of the ranks")
