"""A small world: two loops, both as they run, and everything that can happen to them.

Only what is around them is simple: a wire on which writes lie until delivered, a clock that ticks, a model that draws
token ids by position, and a gateway that may make any call that a gateway may, late, twice or never. So a message that
is lost, delayed or doubled is a call that does not come, comes late or comes twice.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from tandem.workers.errors import Aborted, ForwardFailed, InvalidCall, NoRoom, Stale
from tandem.workers.requests.prefill_request import PrefillResult
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.reservation import Reservation
from tests.protocol.small_island import (
    DECODE,
    PREFILL,
    PROMPT_TOKENS,
    Shape,
    SmallIsland,
    Stream,
    Ticks,
    params,
    prompt_of,
)
from tests.protocol.token_memory import LABELS
from tests.support.prompt_specs import spec_of

LEASE_SECONDS = 10.0
TICK_SECONDS = 0.9 * LEASE_SECONDS  # one tick ends the writer's lease, two the receiver's
ROUNDS_TO_THE_END = 12


@dataclass(frozen=True)
class Limits:
    """The most times that each event may happen; calls are counted for each request."""

    requests: int = 1
    alike: bool = False  # all requests have the same prompt
    routes: tuple[tuple[int, int], ...] = ((PREFILL, DECODE),)  # who computes the prompt and who decodes, in turn
    announces: int = 0
    prepares: int = 1
    sends: int = 1
    starts: int = 1
    hang_ups: bool = False
    streams_end: bool = False
    aborts: int = 0
    ticks: int = 0
    failed_posts: int = 0
    deaths: int = 0
    leaver: int | None = None  # a worker that is lost, or leaves, and is replaced alone
    comes_back: bool = True  # else the leaver's place stays vacant
    joins: bool = False  # whether the leaver's place is vacant at first


@dataclass(eq=False)
class Known:
    """One request, and what the gateway knows about it."""

    request_id: str
    label: int
    sender: int
    receiver: int
    epoch: int = 0  # of the receiver
    sender_epoch: int = 0
    reservation: Reservation | None = None
    announced: int = 0
    prepared: int = 0
    sent: int = 0
    aborted: int = 0
    nobody_sends: bool = False
    results: list["Future[PrefillResult]"] = field(default_factory=list)
    aborts: list["Future[bool]"] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        return self.sender == self.receiver

    @property
    def writer_is_quiet(self) -> bool:
        """Returns whether the gateway may report the writer quiet: the sender did, or will never hear of the
        request."""
        return (
            self.is_local
            or self.nobody_sends
            or any(answer.done() and not answer.exception() for answer in self.aborts)
        )


Action = tuple[str, int]


class World:
    def __init__(self, limits: Limits, shape: Shape) -> None:
        self.limits = limits
        self.shape = shape
        self.findings: list[str] = []
        self.clock = Ticks()
        vacant = limits.leaver if limits.joins else None
        self.island = SmallIsland(shape, 1, LEASE_SECONDS, self.clock, self.findings, vacant)
        self.dead = False  # the prefill worker
        self.away = "parted" if limits.joins else ""  # how far its replacement has come: "left", "cut", "parted"
        self.used = {"tick": 0, "post fails": 0, "die": 0, "leave": 0}
        routes = limits.routes
        self.known = [
            Known(f"r{n}", 1 if limits.alike else n + 1, *routes[n % len(routes)]) for n in range(limits.requests)
        ]

    # What may happen

    def actions(self) -> Iterator[Action]:
        limits, endpoints = self.limits, self.island.endpoints
        if not self.dead and not self.is_away(PREFILL):
            yield "prefill steps", 0
        if not self.is_away(DECODE):
            yield "decode steps", 0
        for pe, device in enumerate(self.island.devices):
            if device.launched and not self.is_away(pe):
                yield "device computes", pe
        for pe, endpoint in enumerate(endpoints):
            if endpoint.incoming:
                yield "deliver", pe
        if self.away and not self.stays_away:
            yield {"left": "cut", "cut": "part", "parted": "welcome"}[self.away], 0
        leaves = int(limits.leaver is not None and not self.away)
        allowed = {"tick": limits.ticks, "post fails": limits.failed_posts, "die": limits.deaths, "leave": leaves}
        for name, most in allowed.items():
            if self.used[name] < most and not (name == "die" and self.dead):
                yield name, 0
        if self.dead:
            yield "new epoch", 0
        for number, known in enumerate(self.known):
            for name in self._calls(known):
                yield name, number

    def _calls(self, known: Known) -> Iterator[str]:
        limits = self.limits
        epochs, sender_there = self.island.epochs, not self.is_away(known.sender)
        if self.is_away(known.receiver):
            return
        current = known.epoch == epochs[known.receiver]
        same_sender = sender_there and known.sender_epoch in (0, epochs[known.sender])
        if known.prepared < limits.prepares and (current or not known.prepared):
            yield "prepare"
        if known.announced < limits.announces and not self.dead and (current or not known.prepared):
            yield "announce"
        if known.reservation is None:
            return
        # A call of an earlier epoch is refused by the service; but the check of its reservation must hold by itself.
        may_send = not known.is_local and not known.nobody_sends and not self.dead and sender_there
        if known.sent < limits.sends and may_send:
            yield "send"
        if not current:
            return
        if len(known.streams) < limits.starts:
            yield "start"
        if limits.hang_ups and known.leases:
            yield "hang up"
        if limits.streams_end and known.streams and not known.streams[0].left:
            yield "stream ends"
        if known.aborted < limits.aborts:
            if not self.dead and same_sender:
                yield "abort at prefill"
            if not known.is_local and not known.sent and not known.nobody_sends:
                yield "never send"
        if known.writer_is_quiet and limits.aborts:
            yield "abort at decode"

    def act(self, action: Action) -> None:
        name, number = action
        if name in self.used:
            self.used[name] += 1
        with suppress(NoRoom, InvalidCall, Stale, Aborted):
            self._does(name, number)()
        self._check()

    def _does(self, name: str, number: int) -> Callable[[], object]:
        island, known = self.island, self.known[min(number, len(self.known) - 1)]
        return {
            "prefill steps": island.loops[PREFILL].step,
            "decode steps": island.loops[DECODE].step,
            "device computes": lambda: island.devices[number].compute_next(),
            "deliver": lambda: island.endpoints[number].deliver(),
            "tick": self._tick,
            "post fails": self._fail_post,
            "die": self._die,
            "new epoch": self._begin_epoch,
            "leave": self._leave,
            "cut": self._cut,
            "part": self._part,
            "welcome": self._welcome,
            "announce": lambda: self._announce(known),
            "prepare": lambda: self._prepare(known),
            "send": lambda: self._send(known),
            "start": lambda: self._start(known),
            "hang up": lambda: known.leases.pop().leave(),
            "stream ends": lambda: self._end_stream(known),
            "abort at prefill": lambda: self._abort_at_prefill(known),
            "never send": lambda: self._never_send(known),
            "abort at decode": lambda: island.loops[known.receiver].abort(known.request_id, writer_quiet=True),
        }[name]

    def _tick(self) -> None:
        self.clock.now += TICK_SECONDS

    def _fail_post(self) -> None:
        self.island.transports[DECODE].posts_that_fail += 1

    def _die(self) -> None:
        """Kills the PE. Its writes may land all the same; it computes and answers nothing any more."""
        self.dead = True

    def _begin_epoch(self) -> None:
        self.dead = False
        self.island = SmallIsland(self.shape, self.island.epoch + 1, LEASE_SECONDS, self.clock, self.findings)

    def is_away(self, pe: int) -> bool:
        return bool(self.away) and pe == self.limits.leaver

    @property
    def stays_away(self) -> bool:
        """Returns whether the leaver has gone for good."""
        return self.away == "parted" and bool(self.used["leave"]) and not self.limits.comes_back

    @property
    def _leaver(self) -> int:
        assert self.limits.leaver is not None
        return self.limits.leaver

    def _leave(self) -> None:
        """Removes the PE. Its writes may land until the other one cuts it."""
        self.away = "left"

    def _cut(self) -> None:
        self.away = "cut"
        self.island.transports[1 - self._leaver].cut(self._leaver)

    def _part(self) -> None:
        self.away = "parted"
        self.island.loops[1 - self._leaver].part(self._leaver)

    def _welcome(self) -> None:
        self.away = ""
        self.island.replace(self._leaver)

    def _announce(self, known: Known) -> None:
        known.announced += 1
        self.island.loops[known.sender].prefills.speculate(known.request_id, spec_of(prompt_of(known.label)))

    def _prepare(self, known: Known) -> None:
        known.prepared += 1
        decodes = self.island.loops[known.receiver].decodes
        wanted, epoch = spec_of(prompt_of(known.label)), self.island.epochs[known.sender]
        offer = decodes.prepare(known.request_id, wanted, self.shape.max_tokens, known.sender, epoch)
        if known.reservation is None:
            known.reservation, known.epoch, known.sender_epoch = offer, offer.epoch, epoch

    def _send(self, known: Known) -> None:
        known.sent += 1
        assert known.reservation is not None
        prefill, wanted = self.island.loops[known.sender].prefills, params(self.shape.max_tokens)
        future = prefill.submit(known.request_id, spec_of(prompt_of(known.label)), wanted, known.reservation)
        if future not in known.results:
            known.results.append(future)
        lease = prefill.attend(known.request_id)
        if lease is not None:
            known.leases.append(lease)

    def _start(self, known: Known) -> None:
        assert known.reservation is not None
        stream = Stream(known.label, PROMPT_TOKENS - known.is_local)  # who computes the prompt has the first token
        known.streams.append(stream)
        try:
            self.island.start(known.receiver, known.request_id, known.reservation, stream)
        except (InvalidCall, Stale):
            stream.left = True
            raise

    def _end_stream(self, known: Known) -> None:
        known.streams[0].left = True
        self.island.loops[known.receiver].decodes.abort(known.request_id, writer_quiet=False)

    def _abort_at_prefill(self, known: Known) -> None:
        known.aborted += 1
        known.aborts.append(self.island.loops[known.sender].prefills.abort(known.request_id))

    def _never_send(self, known: Known) -> None:
        known.aborted += 1
        known.nobody_sends = True

    # What must hold

    def _check(self) -> None:
        """Checks that no write may land where it does not belong, in this state or in any that follows without another
        write."""
        island = self.island
        for pe, endpoint in enumerate(island.endpoints):
            if self.is_away(pe):
                continue
            held = island.held_for_writers(pe)
            for write in endpoint.written():
                for page, token in zip(write.slots, write.tokens, strict=True):
                    if held.get(page) != token:
                        self.findings.append(f"token {token} may land in page {page}, which is for {held.get(page)}")
        for known in self.known:
            done = [future for future in known.results if future.done()]
            failed = [error for error in map(Future.exception, done) if isinstance(error, ForwardFailed)]
            self.findings += [f"{error}" for error in failed]  # a loop survives what its forwards raise
            firsts = [future.result() for future in done if not future.exception()]
            if any(first.first_token != LABELS * known.label + PROMPT_TOKENS for first in firsts):
                self.findings.append(f"first tokens of {known.request_id}: {firsts}")
            if sum(bool(stream.tokens) for stream in known.streams) > 1:
                self.findings.append(f"two streams of {known.request_id} have tokens")

    def come_to_an_end(self) -> None:
        """Runs on without the gateway: everything must come back."""
        if self.dead:
            self._begin_epoch()
        for stage, do in (("left", self._cut), ("cut", self._part), ("parted", self._welcome)):
            if self.away == stage and not self.stays_away:
                do()
        for known in self.known:
            for lease in known.leases:
                lease.leave()
            for stream in known.streams:
                there = known.epoch == self.island.epochs[known.receiver] and not self.is_away(known.receiver)
                if not stream.left and there:
                    self._end_stream(known)
        island, there = self.island, [pe for pe in (DECODE, PREFILL) if not self.is_away(pe)]
        for _ in range(ROUNDS_TO_THE_END):
            if island.is_idle(there):
                break
            self.clock.now += LEASE_SECONDS
            steps, compute = [island.loops[pe].step for pe in there], [island.devices[pe].drain for pe in there]
            for step in (*steps, *compute, *steps):
                step()
                for endpoint in island.endpoints:
                    while endpoint.incoming:
                        endpoint.deliver()
        if not island.is_idle(there):
            self.findings.append(f"no end is reached: {island.state()}")
