"""The loop that serves an actor in its own process, and its messages.

A message is a number of eight bytes and a pickled value: (method, arguments) to the actor, (error, result) back. The
pipe joins the actor's process to the one that asked for it. Nobody else can open it.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from setproctitle import setproctitle

NUMBER_BYTES = 8
TITLE_BYTES = 15  # as long as Linux keeps
_loads: Callable[[bytes], Any] = vars(ForkingPickler)["loads"]  # typeshed declares it as a method
CONSTRUCTOR = 0  # the number of the first message, (kind, argument); it is answered only if the constructor fails


def set_title(name: str) -> None:
    """Sets what `ps` shows of this process to `tandem: ` and its actor's name, which begins with the cluster's.

    `top` and `ps -e` show the last part. From any thread.
    """
    setproctitle(f"tandem: {name}")
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
    """Reads a message. EOFError or OSError when the other end is gone."""
    message = pipe.recv_bytes()
    return int.from_bytes(message[:NUMBER_BYTES], "little"), message[NUMBER_BYTES:]


def serve(pipe: Connection) -> None:
    """Runs each call in a thread. Returns when the constructor fails; EOFError or OSError when the pipe is gone."""
    lock = threading.Lock()

    def send(number: int, answer: bytes) -> None:
        with lock, suppress(OSError):
            write(pipe, number, answer)

    def run(number: int, payload: bytes) -> None:
        try:
            method, arguments = unpack(payload)
            answer = pack((None, getattr(actor, method)(*arguments)))
        except Exception as error:
            answer = _pack_error(error)
        send(number, answer)

    number, first = read(pipe)
    try:
        kind, argument = unpack(first)
        actor = kind(argument)
    except Exception as error:
        send(number, _pack_error(error))
        return
    while True:
        threading.Thread(target=run, args=read(pipe), name=f"call {os.getpid()}", daemon=True).start()


def _pack_error(error: Exception) -> bytes:
    """Packs the error itself if it can be read again, else its text."""
    try:
        payload = pack((error, None))
        unpack(payload)
    except Exception:
        return pack((RuntimeError(f"{type(error).__name__}: {error}"), None))
    return payload
