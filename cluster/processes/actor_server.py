"""An actor at work in a process of its own, and the messages by which it is called.

A message is eight bytes of a number and a pickled value: (method, arguments) on the way in, (error, result) back. It
travels over a pipe between a process and the one that had it forked, which nobody else can open.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

NUMBER_BYTES = 8
TITLE_BYTES = 15  # as long as Linux keeps
_loads: Callable[[bytes], Any] = vars(ForkingPickler)["loads"]  # typeshed takes it for a method
CONSTRUCTOR = 0  # the number of the first message, (kind, argument); it is answered only if the constructor fails


def set_title(name: str) -> None:
    """What `ps -e` and `top` show of this process: the last part of its actor's name. From any thread."""
    title = name.rpartition("/")[2].encode()[:TITLE_BYTES] or b"?"
    with open(f"/proc/self/task/{os.getpid()}/comm", "wb") as comm:
        comm.write(title)


def pack(value: object) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def unpack(payload: bytes) -> Any:
    return _loads(payload)


def write(pipe: Connection, number: int, payload: bytes) -> None:
    pipe.send_bytes(number.to_bytes(NUMBER_BYTES, "little") + payload)


def read(pipe: Connection) -> tuple[int, bytes]:
    """EOFError or OSError when the other end is gone."""
    message = pipe.recv_bytes()
    return int.from_bytes(message[:NUMBER_BYTES], "little"), message[NUMBER_BYTES:]


def serve(pipe: Connection) -> None:
    """One thread a call. Returns when the constructor has failed; EOFError or OSError when the pipe is gone."""
    lock = threading.Lock()

    def answer(number: int, error: Exception | None, result: object) -> None:
        payload = pack((None, result)) if error is None else _pack_error(error)
        with lock, suppress(OSError):
            write(pipe, number, payload)

    def run(number: int, payload: bytes) -> None:
        method, arguments = unpack(payload)
        try:
            result = getattr(actor, method)(*arguments)
        except Exception as error:
            answer(number, error, None)
        else:
            answer(number, None, result)

    number, first = read(pipe)
    try:
        kind, argument = unpack(first)
        actor = kind(argument)
    except Exception as error:
        answer(number, error, None)
        return
    while True:
        threading.Thread(target=run, args=read(pipe), name=f"call {os.getpid()}", daemon=True).start()


def _pack_error(error: Exception) -> bytes:
    """As it is where it can be read again, else its text."""
    try:
        payload = pack((error, None))
        unpack(payload)
    except Exception:
        return pack((RuntimeError(f"{type(error).__name__}: {error}"), None))
    return payload
