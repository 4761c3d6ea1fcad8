"""How one PE begins a connection to another: who it is, and the answer, empty or why it is refused.

connecting PE                                   listening PE
length (2 bytes), Hello as JSON ───────────►    checks it
                          ◄───────────────────  length (2 bytes), reason in UTF-8
"""

import json
import socket
import struct
import time
from dataclasses import asdict, dataclass, fields

from tandem.transfer.errors import MembershipRefused

PROTOCOL = 1
MAX_BYTES = 1024
LENGTH = struct.Struct("<H")


@dataclass(frozen=True)
class Hello:
    """token: of the listening PE's memory, from its handle, in hex. connection: its number among those to that PE."""

    protocol: int
    island: str
    epoch: int
    pe: int
    to_pe: int
    connection: int
    token: str

    def pack(self) -> bytes:
        return _packed(json.dumps(asdict(self)).encode())


def read_hello(connection: socket.socket, deadline: float) -> Hello:
    """MembershipRefused for anything else. OSError after the deadline."""
    try:
        values = json.loads(_read(connection, deadline))
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(Hello)}:
            raise MembershipRefused("the connection does not begin as those of PEs do")
        hello = Hello(**values)
    except (ValueError, RecursionError) as error:
        raise MembershipRefused("the connection does not begin as those of PEs do") from error
    if any(type(getattr(hello, field.name)) is not field.type for field in fields(Hello)):
        raise MembershipRefused("the connection does not begin as those of PEs do")
    return hello


def answer(connection: socket.socket, reason: str) -> None:
    connection.sendall(_packed(reason.encode()[:MAX_BYTES]))


def read_answer(connection: socket.socket, deadline: float) -> str:
    """Empty where the connection was accepted. OSError after the deadline."""
    return _read(connection, deadline).decode(errors="replace")


def _packed(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


def _read(connection: socket.socket, deadline: float) -> bytes:
    (length,) = LENGTH.unpack(_read_exactly(connection, LENGTH.size, deadline))
    if length > MAX_BYTES:
        raise MembershipRefused(f"the first message has {length} bytes; it may have at most {MAX_BYTES}")
    return _read_exactly(connection, length, deadline)


def _read_exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it did not say in time who it is")
        connection.settimeout(left)
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError("it was closed by the peer")
        data += part
    return data
