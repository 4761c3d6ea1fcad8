"""Tests every world of a few small ones, and that the explorer finds what goes wrong without any one protection."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from tandem.cache.operations.receptions import Receptions
from tandem.cache.operations.transfers import TransferCalls
from tandem.transfer.completion import Signal, SignalBoard
from tandem.transfer.recall import RecallDesk, RecallInbox
from tandem.workers.decode.decodes import Decodes
from tandem.workers.handoff import reservations
from tandem.workers.handoff.draining import DrainingWrites
from tandem.workers.handoff.grants import Grants
from tandem.workers.handoff.handoff import Handoff
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.handoff.retired import RetiredSequences
from tandem.workers.prefill.prefills import Prefills
from tandem.workers.prefill.speculative_prefill import SpeculativePrefill
from tandem.workers.wire.lease import Lease
from tests.protocol.explorer import explore
from tests.protocol.wires import Endpoint
from tests.protocol.world import Action
from tests.protocol.worlds import WORLDS

Patch = Callable[[pytest.MonkeyPatch], None]

GATE, LONG = 30, 150  # worlds each, in these tiers; `make explore` has more time


@pytest.mark.gate(f"*-{GATE}")
@pytest.mark.parametrize("bound", [GATE, LONG])
@pytest.mark.parametrize("name", WORLDS)
def test_nothing_goes_wrong(name: str, bound: int) -> None:
    limits, shape = WORLDS[name]
    explored = explore(limits, shape, bound)
    assert explored.finding is None, str(explored.finding)
    assert explored.complete or explored.worlds == bound


def replaced(owner: Any, name: str, by: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, by)


def pages_return_at_once(patch: pytest.MonkeyPatch) -> None:
    end = Reservations.end
    patch.setattr(Reservations, "end", lambda self, request, writer_quiet: end(self, request, True))


def a_lease_frees_pages(patch: pytest.MonkeyPatch) -> None:
    end, reap = Reservations.end, Reservations.reap

    def reap_freely(self: Reservations) -> float | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Reservations, "end", lambda self, request, writer_quiet: end(self, request, True))
            return reap(self)

    patch.setattr(Reservations, "reap", reap_freely)


def any_generation_is_granted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tandem.workers.handoff.grants.is_newer", lambda generation, other: True)


def any_epoch_is_granted(patch: pytest.MonkeyPatch) -> None:
    check = Grants.check

    def checked(self: Grants, reservation: Any, num_tokens: int, border: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            epochs = (reservation.epoch,) * self._engine.peers.num_pes
            inner.setattr(self._engine, "peers", self._engine.peers._replace(epoch=reservation.epoch, epochs=epochs))
            return check(self, reservation, num_tokens, border)

    patch.setattr(Grants, "check", checked)


def aborts_are_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    def abort(self: DrainingWrites) -> "Future[bool]":
        answer: Future[bool] = Future()
        answer.set_result(True)
        return answer

    patch.setattr(DrainingWrites, "abort", abort)


def an_abort_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    abort = Prefills.abort

    def forgetful(self: Prefills, request_id: str) -> "Future[bool]":
        answer = abort(self, request_id)
        self._handoff._ended._aborted.clear()
        return answer

    patch.setattr(Prefills, "abort", forgetful)


def a_recalled_slot_may_be_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "recalled", lambda self: self._engine.recalls_asked())


def aborts_do_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decodes, "abort", lambda self, request_id, writer_quiet: False)


def any_answer_is_the_answer(patch: pytest.MonkeyPatch) -> None:
    """Takes the lane's last word for the answer to any question."""
    patch.setattr("tandem.transfer.recall._word", lambda recall: 1 << 40 | 7)
    patch.setattr("tandem.transfer.recall._signal", lambda word: Signal(0, 1))


def generations_stay(patch: pytest.MonkeyPatch) -> None:
    acquire = SignalBoard.acquire

    def acquired(self: SignalBoard) -> Signal:
        signal = acquire(self)
        self._generations[signal.row] = 1
        return Signal(signal.row, 1)

    patch.setattr(SignalBoard, "acquire", acquired)


def a_failed_post_is_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    post = RecallDesk._post

    def posted(self: RecallDesk, recall: Any) -> None:
        post(self, recall)
        self._posted[recall.pe] = recall

    patch.setattr(RecallDesk, "_post", posted)


def leases_do_not_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lease, "is_over", property(lambda self: False))


def streams_may_be_two(patch: pytest.MonkeyPatch) -> None:
    start = Reservations.start

    def started(self: Reservations, request_id: str, reservation_id: int, max_tokens: int, num_output: int) -> Any:
        request = self._requests.get(request_id)
        if request is not None and request.token_stream is not None:
            return request
        return start(self, request_id, reservation_id, max_tokens, num_output)

    patch.setattr(Reservations, "start", started)


def pages_are_not_held_for_writers(patch: pytest.MonkeyPatch) -> None:
    begin = Receptions.begin

    def begun(self: Receptions, sequence: int, length: int) -> Any:
        position_map = begin(self, sequence, length)
        self.pools.settle(self.incoming.pop(sequence))
        return position_map

    patch.setattr(Receptions, "begin", begun)


def a_prefix_is_shared_before_it_landed(patch: pytest.MonkeyPatch) -> None:
    reserve = Reservations._reserve

    def reserved(self: Reservations, request_id: str, prompt: Any, *rest: Any) -> Any:
        request = reserve(self, request_id, prompt, *rest)
        cache = self._engine._cache
        position_map = cache.prepare_receive(request.sequence_id, request.expected_tokens, rotated=True)
        pages = cache._table.full_pages(cache._table.row(request.sequence_id), len(prompt))
        cache._pools.prefixes.publish(prompt.token_ids, pages)
        patched = pytest.MonkeyPatch()
        patched.setattr(cache, "prepare_receive", lambda *_, **__: (patched.undo(), position_map)[1])
        return request

    patch.setattr(Reservations, "_reserve", reserved)


def every_signal_is_complete(patch: pytest.MonkeyPatch) -> None:
    def received(mailbox: Any, requests: list[Any]) -> Any:
        return reservations.np.array([request.expected_tokens for request in requests])

    patch.setattr(reservations, "received_tokens", received)


def a_speculative_prompt_is_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpeculativePrefill, "expire", lambda self: None)


def a_speculative_prompt_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferCalls, "send_cached", lambda *_: None)


def sequences_go_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetiredSequences, "_do", lambda self, action: action())


def writes_to_a_peer_that_left_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Handoff, "part", lambda self, pe, error, stop: self._grants.forget(pe))


def any_writer_is_granted(patch: pytest.MonkeyPatch) -> None:
    check = Grants.check

    def checked(self: Grants, reservation: Any, num_tokens: int, border: int) -> Any:
        return check(self, replace(reservation, writer_epoch=self._engine.peers.epoch), num_tokens, border)

    patch.setattr(Grants, "check", checked)


def any_receiver_is_granted(patch: pytest.MonkeyPatch) -> None:
    check = Grants.check

    def checked(self: Grants, reservation: Any, num_tokens: int, border: int) -> Any:
        epoch = self._engine.peers.epochs[reservation.target_pe]
        return check(self, replace(reservation, epoch=epoch), num_tokens, border)

    patch.setattr(Grants, "check", checked)


def a_peer_is_not_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Endpoint, "cut", lambda self: None)


def nothing_settles_when_a_writer_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "part", lambda self, pe: [])


PROTECTIONS: dict[str, tuple[str, Patch, str]] = {
    "pages drain": ("cancel", pages_return_at_once, "may land in page"),
    "pages of an expired lease drain": ("expire", a_lease_frees_pages, "may land in page"),
    "pages are held for writers": ("plain", pages_are_not_held_for_writers, "may land in page"),
    "a reservation is used once": ("recall", any_generation_is_granted, "may land in page"),
    "a reservation is of its epoch": ("epoch", any_epoch_is_granted, "may land in page"),
    "a recalled reservation is refused": ("recall", a_recalled_slot_may_be_used, "may land in page"),
    "a recall is answered when all is quiet": (
        "recall", replaced(Handoff, "_recalled", lambda self, recall: []), "may land in page",
    ),
    "a recall is answered": ("recall", replaced(RecallInbox, "answer", lambda self, recall: None), "no end"),
    "an answer is for its recall": ("turns", any_answer_is_the_answer, "may land in page"),
    "an abort is answered when all is quiet": ("cancel", aborts_are_answered_at_once, "may land in page"),
    "an abort is remembered": ("cancel", an_abort_is_forgotten, "may land in page"),
    "a slot's uses have numbers": ("turns", generations_stay, ""),
    "a post that failed is made again": ("recall", a_failed_post_is_taken_for_done, "no end"),
    "leases end": ("expire", leases_do_not_end, "no end"),
    "a request has one stream": ("twice", streams_may_be_two, ""),
    "only what has landed is decoded": ("plain", every_signal_is_complete, "wrong KV"),
    "only what has landed is shared": ("sharing", a_prefix_is_shared_before_it_landed, "wrong KV"),
    "a speculative prompt expires": ("speculative", a_speculative_prompt_is_kept_for_ever, "no end"),
    "what was for a receiver that left is not written": (
        "the receiver leaves", writes_to_a_peer_that_left_go_on, "may land in page",
    ),
    "a reservation is of its writer's epoch": ("the writer leaves", any_writer_is_granted, "may land in page"),
    "a reservation is of its receiver's epoch": ("the receiver leaves", any_receiver_is_granted, "may land in page"),
    "a writer that left is cut": ("the writer leaves", a_peer_is_not_cut, "may land in page"),
    "pages for a writer that left return": ("the writer leaves", nothing_settles_when_a_writer_leaves, "no end"),
    "lanes of a peer that left are void": (
        "the receiver leaves", replaced(RecallInbox, "forget", lambda self, pe: None), "no end",
    ),
    "a speculative prompt is sent": ("speculative", a_speculative_prompt_stays, "wrong KV"),
    "pages of a local prompt outlive its forwards": (
        "local overlapped", sequences_go_at_once, "for a sequence that is gone",
    ),
    "a request that leaves is taken out": ("cancel", aborts_do_nothing, "no end"),
}  # fmt: skip

# What happens first, where a fault lies behind so many actions that its world would be one of hundreds.
_SERVED: tuple[Action, ...] = (
    ("prepare", 0), ("start", 0), ("stream ends", 0), ("decode steps", 0), ("deliver", 0), ("prefill steps", 0),
)  # fmt: skip
_SENT: tuple[Action, ...] = (("prepare", 0), ("send", 0), ("prefill steps", 0))
_PARTED: tuple[Action, ...] = (("leave", 0), ("cut", 0), ("part", 0))
_REPLACED: tuple[Action, ...] = (*_PARTED, ("welcome", 0))
BEGINNINGS: dict[str, tuple[Action, ...]] = {
    "what was for a receiver that left is not written": (*_SENT, *_PARTED),
    "a reservation is of its writer's epoch": (("prepare", 0), *_REPLACED),
    "a reservation is of its receiver's epoch": (("prepare", 0), *_REPLACED),
    "a writer that left is cut": (*_SENT, ("prefill steps", 0), ("leave", 0)),
    "lanes of a peer that left are void": (*_SERVED, *_REPLACED),
    "pages drain": _SENT,
    "pages of an expired lease drain": (("prepare", 0), ("tick", 0), ("tick", 0)),
    "a reservation is used once": _SERVED,
    "a reservation is of its epoch": (("die", 0), ("prepare", 0)),
    "a recalled reservation is refused": _SERVED,
    "a recall is answered when all is quiet": (("prepare", 0), ("send", 0), ("start", 0), ("stream ends", 0)),
    "an abort is answered when all is quiet": _SENT,
    "an abort is remembered": (("prepare", 0), ("abort at prefill", 0)),
    "a request has one stream": _SENT,
    "a speculative prompt is sent": _SENT,
    "an answer is for its recall": (*_SERVED, ("deliver", 1), ("decode steps", 0), ("prepare", 1)),
    "a slot's uses have numbers": (
        ("prepare", 0), ("send", 0), ("prefill steps", 0), ("prefill steps", 0), ("deliver", 1), ("deliver", 1),
        ("deliver", 1), ("start", 0), ("decode steps", 0),
    ),
    "only what has landed is shared": (
        ("prepare", 0), ("prepare", 1), ("send", 1), ("prefill steps", 0), ("prefill steps", 0), ("deliver", 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_each_protection_is_needed(protection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, patch, expected = PROTECTIONS[protection]
    patch(monkeypatch)
    explored = explore(*WORLDS[world], 3000, BEGINNINGS.get(protection, ()))
    assert explored.finding is not None
    assert expected in explored.finding.what
