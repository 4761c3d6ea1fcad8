"""A worker of three ranks, each with an engine of its own, a small ring of calls, and all that can happen to them.

The leader does a fixed program, one call after another. Its followers read when the explorer says so. Devices and peers
get on at any time at each rank. Any rank may be lost at any time: it is killed, or it finds that it cannot go on. Where
the leader waits, the followers that are left read on as far as they can. Then the wait is over, or runs out.
"""

import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.membership import TransportConfig
from tandem.transfer.recall import mailbox_rows
from tandem.workers.engine.admission import Admission
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import RankLost
from tandem.workers.following.calls import MARK
from tandem.workers.following.follower import Follower
from tandem.workers.following.leader import Leader, LeadingEngine
from tandem.workers.ranks.rank_memory import create_memory
from tandem.workers.ranks.ranks import ALONE
from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.runner.model_runner import ModelRunner
from tests.protocol.explorer import Explored, Finding
from tests.protocol.small_island import DECODE, LAYOUT, PREFILL
from tests.protocol.token_memory import TokenMemory
from tests.protocol.wires import Endpoint, WireTransport
from tests.support.prompt_specs import spec_of
from tests.support.tvm_cache import TvmCache

RANKS, PAGES, SIGNALS = 3, 2, 1
RING_BYTES = 100  # of a few calls
SIGNAL = 77
LONGEST_WALK = 80  # events
Event = tuple[str, int]


@dataclass(eq=False)
class Quiet:
    """A fence or a mark of one rank."""

    is_so: bool = False

    def is_quiet(self) -> bool:
        return self.is_so


@dataclass(eq=False)
class Rank:
    """One process. alive: nothing has killed it. fences, marks: those that were made here, in order."""

    number: int
    wires: type[WireTransport] = WireTransport
    alive: bool = True
    fences: list[Quiet] = field(default_factory=list)
    marks: list[Quiet] = field(default_factory=list)
    graph_sizes: GraphSizes = field(default_factory=GraphSizes)
    adapters: None = None

    def __post_init__(self) -> None:
        rows = mailbox_rows(SIGNALS, 2)
        memory = TokenMemory(f"rank {self.number}", PAGES, [])
        self.endpoint = Endpoint(memory, np.zeros((rows, 2), np.int64))
        config = TransportConfig(DECODE, 2, LAYOUT, (PAGES,), rows, "small", 1)
        other = Endpoint(TokenMemory("the writer", PAGES, []), np.zeros((rows, 2), np.int64))
        self.transport = self.wires(config, (other, self.endpoint))
        self.transport.fence = self._fence  # type: ignore[method-assign]
        self.cache = TvmCache(
            LAYOUT,
            self.transport.pools,
            max_sequences=4,
            max_sequence_length=PAGES,
            rope=RopeParameters("none", 0),
            writer=self.transport,
            kernels=memory.bound,
        )

    def mark(self) -> Callable[[], bool]:
        """Makes a mark, as a runner does."""
        self.marks.append(Quiet())
        return self.marks[-1].is_quiet

    def _fence(self, pe: int) -> Quiet:
        self.fences.append(Quiet())
        return self.fences[-1]

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.cache, cast(ModelRunner, self), self.transport


class RankWorld:
    polls = 2, 5, 8  # of the program

    def __init__(self, num_losses: int) -> None:
        self.findings: list[str] = []
        self._losses_left = num_losses
        self.memory, fd, _ = create_memory(RANKS, 2, SIGNALS, RING_BYTES)
        os.close(fd)
        self.ranks = self._make_ranks()
        self.leader = Leader(self.memory)
        lead, *rest = self.ranks
        self.engine = LeadingEngine(*lead.parts, self.leader, ALONE, LAYOUT.token_bytes)
        self.followers = [
            Follower(Engine(*rank.parts), rank.transport, self.memory, number) for number, rank in enumerate(rest, 1)
        ]
        self._mark: Callable[[], bool] | None = None
        self._fence: Any = None
        self._offered = False
        self.at = 0  # in the program
        self._program = self._make_program()

    def _make_ranks(self) -> Sequence[Rank]:
        return [Rank(number) for number in range(RANKS)]

    def _make_program(self) -> list[Callable[[], object]]:
        admission = Admission(spec_of([1, 2]), PAGES, 1, shares=False)
        return [
            lambda: self.engine.admit(1, admission),
            lambda: self._expect(1),
            self._sees_signal,
            lambda: self.engine.received(1),
            self._make_mark,
            self._sees_mark,
            lambda: self.engine.free(1),
            self._make_fence,
            self._sees_fence,
            lambda: self.engine.admit(2, admission),
            lambda: self._expect(2),
            lambda: self.engine.received(2),
            lambda: self.engine.free(2),
            self.leader.close,
        ]

    # What may happen

    def events(self) -> Iterator[Event]:
        lead = self.ranks[0]
        if lead.alive and not self.leader.lost and self.at < len(self._program):
            yield "leader", 0
        for rank in self.ranks:
            number, follower = rank.number, self.followers[rank.number - 1] if rank.number else None
            if not rank.alive or (follower is not None and follower.lost):
                continue
            if follower is not None and self._has_message(number):
                yield "reads", number
            if self._offered and not rank.endpoint.mailbox[0, 0]:
                yield "signal", number
            if any(not one.is_so for one in rank.marks):
                yield "mark", number
            if any(not one.is_so for one in rank.fences):
                yield "fence", number
            if self._losses_left:
                yield "is killed", number
                if follower is not None:
                    yield "gives up", number

    def act(self, event: Event) -> None:
        name, number = event
        rank = self.ranks[number]
        match name:
            case "leader":
                self._lead()
            case "reads":
                self._read(number)
            case "signal":
                rank.endpoint.mailbox[0] = SIGNAL, 0
            case "mark":
                next(one for one in rank.marks if not one.is_so).is_so = True
            case "fence":
                next(one for one in rank.fences if not one.is_so).is_so = True
            case "is killed":
                rank.alive = False
            case _:
                self.followers[number - 1].give_up("a scripted end")
        self._losses_left -= name in ("is killed", "gives up")
        if name in ("signal", "mark", "fence") and number and rank.alive:
            self.followers[number - 1]._publish()  # as it does between two looks
        self._check()

    def _has_message(self, number: int) -> bool:
        return int(self.memory.written[0]) != self.followers[number - 1]._reader._at

    def _read(self, number: int) -> None:
        follower = self.followers[number - 1]
        call = follower._reader.read()
        assert call is not None
        try:
            follower._take(follower._decoder.decode(call))
            follower._publish()
        except Exception as error:
            self.findings.append(f"rank {number} cannot follow: {error}")
            follower.give_up(str(error))

    def _lead(self) -> None:
        before = self.engine.pages
        try:
            is_so = self._program[self.at]()
        except RankLost:
            if not self.has_loss:
                self.findings.append(f"the leader gives up, and no rank is lost: {self.leader.lost}")
            if not self.leader.lost or not self.memory.sums[0]:
                self.findings.append("a rank is lost, and others may wait for it in a sum")
            return
        if self.leader.lost and self.engine.pages != before and self.at != len(self._program) - 1:
            self.findings.append("the leader acts on behind its end")
        self.at += is_so is not False

    @property
    def has_loss(self) -> bool:
        return not all(rank.alive for rank in self.ranks) or any(one.lost for one in self.followers)

    # The leader's program

    def _expect(self, sequence: int) -> None:
        self.engine.expect(sequence, PAGES)
        self._offered = True
        for rank in self.ranks:  # a peer may write from now on
            if sequence not in rank.cache._receptions.incoming:
                self.findings.append(f"pages are offered that rank {rank.number} has not set aside")

    def _sees_signal(self) -> bool:
        seen = int(self.engine.mailbox()[0, 0]) == SIGNAL
        self._need("a signal", seen, all(int(rank.endpoint.mailbox[0, 0]) == SIGNAL for rank in self.ranks))
        return seen

    def _make_mark(self) -> None:
        self._mark = self.engine.mark()

    def _sees_mark(self) -> bool:
        assert self._mark is not None
        self._need("a mark", seen := self._mark(), all(rank.marks and rank.marks[0].is_so for rank in self.ranks))
        return seen

    def _make_fence(self) -> None:
        self._fence = self.engine.fence(PREFILL)

    def _sees_fence(self) -> bool:
        self._need(
            "a fence", seen := self._fence.is_quiet(), all(rank.fences and rank.fences[0].is_so for rank in self.ranks)
        )
        return seen

    def _need(self, what: str, seen: bool, is_so: bool) -> None:
        if seen and not is_so:
            self.findings.append(f"{what} counts that is not there on each rank")

    # What must hold

    def _check(self) -> None:
        """Checks that unread calls are whole: the ring never overtakes a follower."""
        written = int(self.memory.written[0])
        for rank, follower in zip(self.ranks[1:], self.followers, strict=True):
            if rank.alive and not follower.lost and not 0 <= written - follower._reader._at <= RING_BYTES:
                self.findings.append(f"calls are overwritten that rank {rank.number} has not read")

    def wait(self, is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Waits as wait_until() does: the followers that are left read on meanwhile, the last one first."""
        while not is_so():
            readers = [rank.number for rank in self.ranks[:0:-1] if self._reads(rank)]
            if not readers:
                raise RankLost(otherwise)
            self._read(readers[0])

    def _reads(self, rank: Rank) -> bool:
        return rank.alive and not self.followers[rank.number - 1].lost and self._has_message(rank.number)

    def come_to_an_end(self) -> None:
        """Runs everything that can happen without a loss. The program or the leader ends, and no follower goes on."""
        self._losses_left = 0
        while (event := next((one for one in self.events() if self._moves(one)), None)) is not None:
            self.act(event)
            if self.findings:
                return
        if not self.ranks[0].alive:
            return
        if not self.has_loss and self.at < len(self._program):
            self.findings.append(f"no end is reached: the leader stands at call {self.at}")
        if not self.has_loss:
            if any(rank.cache.num_free_pages != PAGES for rank in self.ranks):
                self.findings.append("pages are not free on each rank")
            return
        with suppress(RankLost):  # where no poll has told of the loss, a later call does
            self.leader.tell(MARK)
            self.leader.wait_for_all()
        if not self.leader.lost:
            self.findings.append("a rank is lost, and the leader goes on")

    def _moves(self, event: Event) -> bool:
        """Returns whether the event changes anything. A poll that is not true yet does not."""
        if event[0] != "leader" or self.at not in self.polls:
            return True
        return bool(self._program[self.at]())

    def state(self) -> tuple[object, ...]:
        """Returns the state that tells worlds apart."""
        return (
            self.at,
            self._losses_left,
            bool(self.leader.lost),
            *((one._reader._at, bool(one.lost)) for one in self.followers),
            *((rank.alive, int(rank.endpoint.mailbox[0, 0])) for rank in self.ranks),
            *(tuple(one.is_so for one in (*rank.marks, *rank.fences)) for rank in self.ranks),
        )


@contextmanager
def rank_world(num_losses: int, kind: type[RankWorld] = RankWorld) -> Iterator[RankWorld]:
    """Yields a world whose waits are its own, and which logs no losses."""
    disabled, world = logging.root.manager.disable, kind(num_losses)
    logging.disable(logging.CRITICAL)
    try:
        with (
            patch("tandem.workers.following.leader.wait_until", world.wait),
            patch("tandem.workers.ranks.rank_memory.wait_until", world.wait),
        ):
            yield world
    finally:
        logging.disable(disabled)


def walk(seed: int, num_losses: int, kind: type[RankWorld] = RankWorld) -> str:
    """Walks one random way to the end. Returns what goes wrong, and the way; empty if nothing does."""
    chance, way = random.Random(seed), list[Event]()
    with rank_world(num_losses, kind) as world:
        while not world.findings and (events := list(world.events())) and len(way) < LONGEST_WALK:
            way.append(chance.choice(events))
            world.act(way[-1])
        return _told(world, way)


def explore_ranks(num_losses: int, most_worlds: int) -> Explored:
    """Explores as explore() does. Each world is reached from the first one anew: it has few events, and memory of its
    own."""
    known, todo = set[object](), deque[tuple[Event, ...]]([()])
    while todo:
        before = todo.popleft()
        with rank_world(num_losses) as world:
            events = list(_moved(world, before).events())
        for event in events:
            way = (*before, event)
            with rank_world(num_losses) as world:
                state = _moved(world, way).state()
                if state in known:
                    continue
                if len(known) == most_worlds:
                    return Explored(len(known), False, None)
                known.add(state)
                todo.append(way)
                if what := _told(world, way):
                    return Explored(len(known), False, Finding(what, way))
    return Explored(len(known), True, None)


def _moved(world: RankWorld, way: Sequence[Event]) -> RankWorld:
    for event in way:
        world.act(event)
    return world


def _told(world: RankWorld, way: Sequence[Event]) -> str:
    if not world.findings:
        world.come_to_an_end()
    return f"{world.findings[0]}\nafter {way}" if world.findings else ""
