"""The two words of a mailbox row in shared memory, at each moment between the steps of their writer or reader.

Other processes look whenever they like. Here the other side acts between any two bytecodes of the one under test, so
that no order of two accesses goes unseen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

from tandem.transfer.completion import pack_signal
from tandem.transfer.shared_memory import SharedMemoryTransport
from tandem.transfer.transport import Transport
from tests.transfer.peer_process import peer_config

ROW, PAYLOAD = 3, 77
SIGNAL = pack_signal(1, 5)


@pytest.fixture
def pair() -> Iterator[list[SharedMemoryTransport]]:
    """A writer, PE 0, and a reader, PE 1."""
    transports = [SharedMemoryTransport(peer_config(pe, 2)) for pe in range(2)]
    handles = [transport.open() for transport in transports]
    for transport in transports:
        transport.join(handles)
    yield transports
    for transport in transports:
        transport.close()


@contextmanager
def between_bytecodes(code: CodeType, act: Callable[[], None]) -> Iterator[None]:
    """Acts before each line and each bytecode of the function whose code that is. What acts is not traced itself."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event in ("line", "opcode"):  # Python 3.12 may leave bytecodes out
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def row_seen(transport: Transport) -> tuple[int, int]:
    signal, payload = transport.mailbox()[ROW].tolist()
    return signal, payload


def test_a_reader_never_sees_a_signal_before_its_payload(pair: list[SharedMemoryTransport]) -> None:
    writer, reader = pair
    seen: list[tuple[int, int]] = []
    with between_bytecodes(SharedMemoryTransport.post.__code__, lambda: seen.append(row_seen(reader))):
        writer.post(1, ROW, SIGNAL, PAYLOAD)
    seen.append(row_seen(reader))
    assert set(seen) == {(0, 0), (0, PAYLOAD), (SIGNAL, PAYLOAD)}


def test_a_post_while_the_mailbox_is_read_shows_no_signal_without_its_payload(
    pair: list[SharedMemoryTransport],
) -> None:
    writer, reader = pair
    seen: set[tuple[int, int]] = set()
    moment, moments = 0, 1
    while moment < moments:  # one post a time, each at another moment of a read
        writer.post(1, ROW, 0, 0)
        moments = 0

        def act(at: int = moment) -> None:
            nonlocal moments
            if moments == at:
                writer.post(1, ROW, SIGNAL, PAYLOAD)
            moments += 1

        with between_bytecodes(SharedMemoryTransport.mailbox.__code__, act):
            seen.add(row_seen(reader))
        moment += 1
    assert (SIGNAL, PAYLOAD) in seen
    assert seen <= {(0, 0), (0, PAYLOAD), (SIGNAL, PAYLOAD)}
