"""The protocol of a fork server: one request a connection, with a length, JSON, and descriptors next to it."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LENGTH_BYTES = 8
PID_BYTES = 8
MOST_BYTES = 16 << 20  # an environment is a few KiB
DESCRIPTORS = 4  # of an order: its pipe, its lifeline, stdout and stderr


@dataclass(frozen=True)
class ForkOrder:
    """An order for an actor, with what the actor takes over from the process that asks. An order without a name asks
    for no actor: the server answers once the modules are imported, and the open connection keeps the server."""

    name: str = ""
    modules: tuple[str, ...] = ()  # imported before the answer, unless the server has them already
    environment: tuple[tuple[str, str], ...] = ()
    folder: str = ""  # its working folder
    niceness: int = 0
    oom_score: int = 0  # which the kernel goes by when memory runs out


def order_from_here(name: str, modules: Sequence[str]) -> ForkOrder:
    """Makes an order for an actor that is as if this process had started it."""
    return ForkOrder(
        name,
        tuple(modules),
        tuple(os.environ.items()),
        os.getcwd(),
        os.getpriority(os.PRIO_PROCESS, 0),
        int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii")),
    )


def send_order(asked: socket.socket, order: ForkOrder, descriptors: Sequence[int] = ()) -> None:
    payload = json.dumps(asdict(order)).encode()
    length = len(payload).to_bytes(LENGTH_BYTES, "little")
    if descriptors:
        socket.send_fds(asked, [length], list(descriptors))
    else:
        asked.sendall(length)
    asked.sendall(payload)


def receive_order(asked: socket.socket) -> tuple[ForkOrder, list[int]]:
    """Receives an order and its descriptors, which the caller owns. OSError or EOFError when the other end is gone, or
    asks for something else."""
    head, descriptors, *_ = socket.recv_fds(asked, LENGTH_BYTES, DESCRIPTORS)
    try:
        length = int.from_bytes(head, "little")
        if len(head) != LENGTH_BYTES or length > MOST_BYTES:
            raise EOFError("no order")
        payload = bytearray()
        while len(payload) < length:
            part = asked.recv(min(length - len(payload), 1 << 16))
            if not part:
                raise EOFError("an order ended early")
            payload += part
        return _read(payload), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def _read(payload: bytes | bytearray) -> ForkOrder:
    try:
        fields = json.loads(payload)
        return ForkOrder(
            fields["name"],
            tuple(fields["modules"]),
            tuple((name, value) for name, value in fields["environment"]),
            fields["folder"],
            int(fields["niceness"]),
            int(fields["oom_score"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EOFError(f"not an order: {error}") from error


def send_answer(asked: socket.socket, pid: int, descriptors: Sequence[int]) -> None:
    socket.send_fds(asked, [pid.to_bytes(PID_BYTES, "little")], list(descriptors))


def receive_answer(asked: socket.socket, descriptors: int) -> tuple[int, list[int]]:
    """Receives a pid and so many descriptors. EOFError when the server has ended."""
    answer, received, *_ = socket.recv_fds(asked, PID_BYTES, descriptors)
    if len(answer) != PID_BYTES or len(received) != descriptors:
        close_all(received)
        raise EOFError("the fork server has ended")
    return int.from_bytes(answer, "little"), received


def is_ours(peer: socket.socket) -> bool:
    """Returns whether the peer process runs for this process's user. Any process can find an abstract address."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid == os.geteuid()


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
