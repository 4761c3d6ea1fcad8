"""The receiving side of a handoff: what this worker holds for its peers to write into, or for prompts of its own.

           start()                 receive()
reserved ──────────► awaiting KV ────────────► settled
   │ lease over, abort  │ abort                   ▲
   └──────────┬─────────┘                         │ writer quiet: its signal, its answer to a recall,
              ▼                                   │ the gateway's word for it
           draining ──────────────────────────────┘

No peer writes for a local reservation, whose prompt this worker computes itself: it is settled from the beginning.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument, OutOfPages, OutOfSequences
from tandem.transfer.completion import SignalBoard, unpack_payload
from tandem.transfer.errors import NoFreeSignal
from tandem.transfer.recall import Recall
from tandem.transfer.wire_map import encode_map
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.engine.admission import Admission, MostBytes, any_number
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import CorruptKV, InvalidCall, NoRoom, NoSlot, StaleEpoch, StaleReservation
from tandem.workers.handoff.sequence_room import SequenceRoom
from tandem.workers.handoff.slot_turns import SlotTurns
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.sequence_ids import SequenceIds
from tandem.workers.wire.lease import Clock, Lease
from tandem.workers.wire.prompt_spec import PromptSpec
from tandem.workers.wire.reservation import Reservation

DRAIN_POLL_SECONDS = 0.005


class Ask(NamedTuple):
    """A prompt that wants room for itself and for its output, and which PE will write it."""

    prompt: PromptSpec
    max_tokens: int
    writer_pe: int


class Reservations:
    """Every request from PrepareReceive until no write can come any more. Owned by the step thread.

    Pages and signal slot of a cancelled reservation stay out of use until its writer is known to be quiet, or the epoch
    ends. No lease and no timeout frees them.

    Workers that prefill for each other must not wait for each other's pages in a circle. So reservations for writers of
    a higher PE leave room for one prompt of the greatest length, and a slot for its adapter. Then a worker's prompts
    never wait for a higher PE.
    """

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        ids: SequenceIds,
        settings: LoopSettings,
        clock: Clock,
        most_bytes: MostBytes = any_number,
    ) -> None:
        self._engine = engine
        self._most_bytes = most_bytes
        self._counters = counters
        self._ids = ids
        self._max_sequences = settings.max_sequences
        self.room = SequenceRoom(engine, settings)
        self.slots = SlotTurns(engine, clock, settings.priority_seconds)
        self._sharing = settings.sharing
        self._verify = settings.verify
        self._lease_seconds, self._clock = settings.lease_seconds, clock
        self._signals = SignalBoard(engine.peers.num_signals)
        self._requests: dict[str, DecodeRequest] = {}
        self._offers: dict[str, Reservation] = {}
        self._leases: dict[str, Lease] = {}  # of those not started
        self._draining: dict[Recall, DecodeRequest] = {}
        self._refused: tuple[str, ...] = ()  # prefixes, one for each gateway that was lost

    def __len__(self) -> int:
        """Counts requests between reservation and last token."""
        return len(self._requests)

    def get(self, request_id: str) -> DecodeRequest | None:
        return self._requests.get(request_id)

    def decoded(self) -> list[DecodeRequest]:
        """Returns the requests that have their first token, and have neither ended nor been parked."""
        return [request for request in self._requests.values() if request.output and not request.parked]

    @property
    def awaits_peers(self) -> bool:
        """Whether a peer may still write for a request."""
        return any(not request.received for request in self._requests.values())

    def refuse(self, prefix: str) -> None:
        """Refuses, from now on, every request whose id begins with `prefix`."""
        self._refused = (*self._refused, prefix)

    def request_ids(self) -> list[str]:
        """The ids of all requests, including those that drain."""
        return [*self._requests, *(request.request_id for request in self._draining.values())]

    def prepare(
        self,
        request_id: str,
        prompt: PromptSpec,
        max_tokens: int,
        writer_pe: int,
        writer_epoch: int = 0,
    ) -> Reservation:
        """Sets pages aside for a prompt that writer_pe will send and for its growth. Idempotent by request_id.

        writer_epoch: 0 is this worker's. No prefix is matched of a sequence that slides: what leaves its window has to
        give pages back. Raises NoRoom, which leaves nothing behind, InvalidCall and StaleEpoch.
        """
        if request_id in self._offers:
            return self._offers[request_id]
        draining = any(request.request_id == request_id for request in self._draining.values())
        if draining or request_id.startswith(self._refused):
            raise InvalidCall(f"request {request_id!r} was aborted")
        if writer_pe >= self._engine.peers.num_pes:
            raise InvalidCall(f"writer_pe is {writer_pe}; it must be from 0 to {self._engine.peers.num_pes - 1}")
        peers = self._engine.peers
        if (writer_epoch or peers.epoch) != peers.epochs[writer_pe]:
            self._counters.stale_calls += 1
            raise StaleEpoch(writer_epoch or peers.epoch, peers.epochs[writer_pe], writer_pe)
        local = writer_pe == self._engine.peers.pe
        room = self._engine.room(*self.room.reach(prompt, max_tokens, local=local), prompt.encoder.length)
        if (shortage := room.shortage) is not None:
            raise InvalidCall(
                f"prompt and max_tokens need {shortage[0]} pages; this worker has {shortage[1]} "
                f"of {self._engine.layout.page_size} tokens"
            )
        if not self.has_sequence:
            raise NoRoom(f"all {self._max_sequences} sequences of this worker are taken")
        if not self.slots.may_begin(prompt.adapter, prompt.priority, self._spare_slots(writer_pe)):
            raise NoSlot("other requests use all slots for adapters, or are next to get one (adapters.max_resident)")
        reach = self.room.first_reach(prompt, max_tokens, local=local)
        request = self._reserve(request_id, prompt, max_tokens, reach, writer_pe)
        self.slots.took(prompt.adapter)
        self._counters.reservations += 1
        self._requests[request_id] = request
        pages = max(self._engine.room(*reach, prompt.encoder.length).needed)
        self._offers[request_id] = self._offer(request, pages, writer_pe)
        self._leases[request_id] = Lease(self._lease_seconds, self._clock)
        return self._offers[request_id]

    def start(self, request_id: str, reservation_id: int, max_tokens: int, num_output: int = 0) -> DecodeRequest:
        """Returns the request, whose lease ends here. From now on it lives as long as its stream.

        Raises InvalidCall if it has a stream already, or wants more tokens than pages were reserved for. Also when its
        prompt has no tokens before the num_output ones that an earlier placement has put out.
        """
        request = self._requests.get(request_id)
        if request is None or request.sequence_id != reservation_id:
            self._counters.stale_calls += 1
            raise StaleReservation(
                f"reservation {reservation_id} of request {request_id!r} is not held here: never made, ended or expired"
            )
        if request.token_stream is not None:
            raise InvalidCall(f"request {request_id!r} has a stream already")
        if max_tokens > request.max_tokens:
            raise InvalidCall(f"sampling.max_tokens is {max_tokens}; pages are reserved for {request.max_tokens}")
        if num_output >= len(request.prompt):
            raise InvalidCall(f"num_output is {num_output}; the prompt of {len(request.prompt)} tokens must be longer")
        del self._leases[request_id]
        request.prompt = replace(request.prompt, num_output=num_output)
        return request

    def narrow(self, request: DecodeRequest) -> None:
        """Narrows the room of a local request whose prompt is computed: from now on it grows by single tokens, and
        drafts, or slides. It may have only a part of its output to grow into.

        It takes no page that prepare() has not set aside, even if others share some by now. OutOfPages, which changes
        nothing, would say that the request may not be able to grow.
        """
        capacity, longest = self.room.reach(request.prompt, request.max_tokens)
        request.reserved = min(capacity, request.reserved)
        self._engine.narrow(request.sequence_id, request.reserved, longest, request.prompt.sliding)

    def mailbox(self) -> Int64Array:
        """See Transport.mailbox; counts signals that came too late."""
        mailbox = self._engine.mailbox()
        self._counters.stale_signals += self._signals.count_stale(mailbox)
        return mailbox

    def receive(self, request: DecodeRequest, mailbox: Int64Array) -> int:
        """Returns the first token of a request whose KV is complete. Raises CorruptKV: then the request must end."""
        assert request.signal is not None
        token, sent = unpack_payload(int(mailbox[request.signal.row, 1]))
        self._settle(request)
        if self._verify:
            end, sliding = len(request.prompt), request.prompt.sliding
            found = self._engine.digest(request.sequence_id, end - request.expected_tokens, end, sliding)
            if found != sent:
                self._counters.corrupt += 1
                raise CorruptKV(
                    f"KV of request {request.request_id!r} has digest {found:#010x} here, {sent:#010x} at its writer"
                )
        return token

    def end(self, request: DecodeRequest, writer_quiet: bool) -> None:
        """Lets go of a request; the caller removes its sequence. Then its pages return if its KV is complete or the
        writer is quiet, else they drain."""
        del self._requests[request.request_id]
        offer = self._offers.pop(request.request_id)
        self._leases.pop(request.request_id, None)
        signal = request.signal
        if signal is None or request.received:
            self._settle(request)
            return
        mailbox = self.mailbox()  # what its writer may have posted is not stale: it is seen before the slot's next use
        if writer_quiet or landed(mailbox, [request]):
            self._settle(request)
        else:
            recall = Recall(offer.writer_pe, signal)
            self._draining[recall] = request
            self._counters.drains += 1
            self._engine.recall(recall)

    def settle_draining(self, request_id: str) -> bool:
        """Frees what a draining request holds: its writer is quiet, as the caller has heard. False if no request of
        that id drains."""
        for recall, request in self._draining.items():
            if request.request_id == request_id:
                self.mailbox()  # what its writer may have posted is not stale: it is seen before the slot's next use
                self._engine.withdraw(recall)
                self._settle(self._draining.pop(recall))
                return True
        return False

    def part(self, pe: int) -> list[DecodeRequest]:
        """Frees the pages that drain for a writer that was cut, because none of its writes can come any more. Returns
        the requests whose KV it has not written as a whole, for the caller to end."""
        mailbox = self.mailbox()
        for recall in [recall for recall in self._draining if recall.pe == pe]:
            self._engine.withdraw(recall)
            self._settle(self._draining.pop(recall))
        awaited = [request for request in self._requests.values() if self._offers[request.request_id].writer_pe == pe
                   and not request.received]  # fmt: skip
        complete = landed(mailbox, awaited)
        return [request for request in awaited if request not in complete]

    def reap(self) -> float | None:
        """Ends reservations whose lease is over, and frees what has drained. Needs no free page.

        Returns in how many seconds it has to be called again; None: not before another call changed something.
        """
        if not self._leases and not self._draining:
            return None
        for request_id in [request_id for request_id, lease in self._leases.items() if lease.is_over]:
            self._counters.expired_leases += 1
            request = self._requests[request_id]
            self._engine.free(request.sequence_id)
            self.end(request, writer_quiet=False)
        if self._draining:
            self._settle_drained()
            return DRAIN_POLL_SECONDS
        return min((lease.seconds_left or 0.0 for lease in self._leases.values()), default=None)

    def _settle_drained(self) -> None:
        mailbox = self.mailbox()
        done = self._engine.recalls_answered(mailbox)
        complete = [recall for recall, request in self._draining.items() if landed(mailbox, [request])]
        self._counters.recalled += len(done)
        for recall in {*done, *complete}:
            self._engine.withdraw(recall)
            self._settle(self._draining.pop(recall))

    def _reserve(
        self,
        request_id: str,
        prompt: PromptSpec,
        max_tokens: int,
        reach: tuple[int, int],
        writer_pe: int,
    ) -> DecodeRequest:
        """reach: how long the sequence may become, and the longest append of one forward."""
        engine, sequence_id, own_pe = self._engine, self._ids.take(), self._engine.peers.pe
        slides = prompt.sliding is not None
        shares = self._sharing and not prompt.whole and not slides
        try:
            most_bytes = self._most_bytes() if shares else None
            asked = Admission(prompt, *reach, shares, slides and writer_pe != own_pe, most_bytes)
            matched = engine.admit(sequence_id, asked)
            if writer_pe > own_pe and not self._has_room_for_longest():
                raise NoRoom(f"no room for request {request_id!r}: what is left is for a prompt of a peer")
            signal = None if writer_pe == own_pe else self._signals.acquire()
        except BaseException as error:
            engine.free(sequence_id)
            if isinstance(error, OutOfPages | OutOfSequences | NoFreeSignal):
                raise NoRoom(f"no room for request {request_id!r}: {error}") from error
            if isinstance(error, InvalidArgument):  # a window that this cache does not take
                raise InvalidCall(f"request {request_id!r}: {error}") from error
            raise
        begun = engine.sequence(sequence_id)
        return DecodeRequest(
            request_id=request_id,
            sequence_id=sequence_id,
            prompt=prompt,
            signal=signal,
            expected_tokens=len(prompt) - matched,
            host_cached_tokens=begun.num_fetched,
            disk_cached_tokens=begun.num_lifted,
            max_tokens=max_tokens,
            received=signal is None,
            reserved=reach[0],
        )

    def shortage(self, ask: Ask) -> tuple[list[int], int]:
        """Returns the pages of each layer group, and the sequences, that prepare() lacks for `ask`; 0 or less where
        none is lacking."""
        local = ask.writer_pe == self._engine.peers.pe
        reach = self.room.first_reach(ask.prompt, ask.max_tokens, local=local)
        room = self._engine.room(*reach, ask.prompt.encoder.length)
        needed = list(room.needed)
        if ask.writer_pe > self._engine.peers.pe:
            beside = zip(*(one.needed for one in self.room.for_longest()), strict=True)
            needed = [own + max(longest) for own, longest in zip(needed, beside, strict=True)]
        lacking = [need - free for need, free in zip(needed, room.free, strict=True)]
        return lacking, self._num_taken + 1 - self._max_sequences

    def has_room(self, request: DecodeRequest) -> bool:
        """Returns whether a parked request can go on now, apart from the slot for its adapter."""
        reach = self.room.first_reach(request.prompt, request.max_tokens, len(request.output))
        return self._engine.room(*reach, request.prompt.encoder.length).fits and self.has_sequence

    def needs_slot(self, ask: Ask, *, freed: int = 0) -> bool:
        """Returns whether `ask` finds no slot for its adapter, also if so many more were unused."""
        prompt = ask.prompt
        spare = self._spare_slots(ask.writer_pe)
        return not self.slots.would_begin(prompt.adapter, prompt.priority, spare, freed=freed)

    def _spare_slots(self, writer_pe: int) -> int:
        """Returns the number of slots that a reservation for this writer leaves unused."""
        return int(writer_pe > self._engine.peers.pe)

    @property
    def _num_taken(self) -> int:
        """The number of sequences in use, among those that this worker may have."""
        counted = (not request.parked and not request.replaced for request in self._requests.values())
        return len(self._draining) + sum(counted)

    @property
    def has_sequence(self) -> bool:
        """Whether one more sequence may be in use."""
        return self._num_taken < self._max_sequences

    def _has_room_for_longest(self) -> bool:
        """Returns whether a prompt of the greatest length has room; with an encoder, with all of it in either half."""
        return all(room.fits for room in self.room.for_longest())

    def _offer(self, request: DecodeRequest, pages: int, writer_pe: int) -> Reservation:
        """Makes the reservation for the writer. A local reservation has no map, and no mailbox row."""
        engine, signal = self._engine, request.signal
        position_map = None
        if signal is not None:
            position_map = engine.expect(request.sequence_id, request.expected_tokens)
        return Reservation(
            reservation_id=request.sequence_id,
            epoch=engine.peers.epoch,
            target_pe=engine.peers.pe,
            writer_pe=writer_pe,
            signal_slot=0 if signal is None else signal.row,
            generation=0 if signal is None else signal.generation,
            matched_tokens=len(request.prompt) - request.expected_tokens,
            wire_map=None if position_map is None else encode_map(position_map, engine.layout),
            pages=pages,
            lease_seconds=self._lease_seconds,
            writer_epoch=engine.peers.epochs[writer_pe],
        )

    def _settle(self, request: DecodeRequest) -> None:
        """Settles a request for which no write can come any more."""
        if not request.received:
            assert request.signal is not None
            request.received = True
            self._engine.received(request.sequence_id)
            self._signals.release(request.signal)


def received_tokens(mailbox: Int64Array, requests: list[DecodeRequest]) -> Int64Array:
    """int64 [n]: tokens received of each request that a peer writes for, 0 before its signal."""
    signals = [request.signal for request in requests if request.signal is not None]
    rows = np.array([signal.row for signal in signals], np.int64)
    generations = np.array([signal.generation for signal in signals], np.int64)
    return SignalBoard.landed(mailbox, rows, generations)


def landed(mailbox: Int64Array, requests: list[DecodeRequest]) -> list[DecodeRequest]:
    """Returns the requests whose KV has arrived in full. The signal comes after quiet: once it is there, the sender
    writes no more."""
    received = zip(requests, received_tokens(mailbox, requests).tolist(), strict=True)
    return [request for request, tokens in received if tokens >= request.expected_tokens]
