"""Recalls between two workers that are receiver and writer towards each other at the same time."""

import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.completion import Signal
from tandem.transfer.recall import Recall, RecallDesk, RecallInbox, mailbox_rows, num_request_rows
from tests.support.fake_transport import FakeFabric, FakeTransport

LAYOUT = KVLayout((LayerGroup((0,), KV(1, 4)),), 4, torch.float32)
SIGNAL = Signal(1, 7)  # the same use of the same row on both sides: the words are equal


def joined(num_pes: int) -> list[FakeTransport]:
    return FakeFabric(num_pes, LAYOUT, num_pages=2, num_signals=mailbox_rows(3, num_pes)).joined()


def test_what_a_peer_asks_is_not_taken_for_its_answer() -> None:
    transports = joined(2)
    desks, inboxes = map(RecallDesk, transports), [RecallInbox(transport) for transport in transports]
    one, other = desks
    one.ask(Recall(1, SIGNAL))
    other.ask(Recall(0, SIGNAL))
    for _ in range(3):
        assert one.exchange(transports[0].mailbox()) == other.exchange(transports[1].mailbox()) == []
    assert [inbox.unanswered() for inbox in inboxes] == [[Recall(1, SIGNAL)], [Recall(0, SIGNAL)]]
    inboxes[0].answer(Recall(1, SIGNAL))
    assert one.exchange(transports[0].mailbox()) == []
    assert other.exchange(transports[1].mailbox()) == [Recall(0, SIGNAL)]
    assert inboxes[0].unanswered() == []
    inboxes[1].answer(Recall(0, SIGNAL))
    assert one.exchange(transports[0].mailbox()) == [Recall(1, SIGNAL)]


def test_lanes_lie_behind_the_rows_of_reservations() -> None:
    transports = joined(3)
    assert [num_request_rows(transport) for transport in transports] == [3, 3, 3]
    assert transports[0].num_signals == 3 + 2 * 3
    for transport in transports:
        for pe in range(3):
            if pe != transport.pe:
                desk = RecallDesk(transport)
                desk.ask(Recall(pe, SIGNAL))
                desk.exchange(transport.mailbox())
    for pe, transport in enumerate(transports):
        assert not transport.mailbox()[:3].any()
        assert RecallInbox(transport).unanswered() == [Recall(other, SIGNAL) for other in range(3) if other != pe]
