"""Tests what systemd is told, through a socket as it makes one."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.cli.service_manager import ServiceManager

ABSTRACT = f"@tandem-notify-{os.getpid()}"


@pytest.fixture
def listener(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    named = getattr(request, "param", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(named.replace("@", "\0"))
        listener.settimeout(10)
        yield listener


def environ(listener: socket.socket, **more: str) -> dict[str, str]:
    name = listener.getsockname()
    return {"NOTIFY_SOCKET": f"@{name[1:].decode()}" if isinstance(name, bytes) else name, **more}


@pytest.mark.parametrize("listener", [ABSTRACT], ids=["abstract"], indirect=True)
def test_a_socket_in_the_abstract_namespace(listener: socket.socket) -> None:
    manager = ServiceManager.from_environ(environ(listener))
    manager.status("reading weights")
    manager.close()
    assert listener.recv(1024) == b"STATUS=reading weights"


def test_signs_of_life_stop_when_nothing_lives(listener: socket.socket) -> None:
    lives, asked = threading.Event(), threading.Semaphore(0)
    lives.set()

    def alive() -> bool:
        asked.release()
        return lives.is_set()

    manager = ServiceManager.from_environ(environ(listener, WATCHDOG_USEC="30000", WATCHDOG_PID=str(os.getpid())))
    manager.ready("serves", alive)
    assert [listener.recv(1024) for _ in range(3)] == [b"READY=1\nSTATUS=serves", b"WATCHDOG=1", b"WATCHDOG=1"]
    lives.clear()
    manager.status("hangs")
    while listener.recv(1024) != b"STATUS=hangs":
        pass
    for _ in range(20):  # beats that were counted before it ended, and then some
        asked.acquire(timeout=10)
    listener.setblocking(False)
    late = 0
    while late < 2:
        try:
            assert listener.recv(1024) == b"WATCHDOG=1"
            late += 1
        except BlockingIOError:
            break
    assert late < 2  # one may have been under way
    listener.settimeout(10)
    manager.stopping()  # which may take longer than the watchdog waits
    assert [listener.recv(1024) for _ in range(2)] == [b"STOPPING=1\nSTATUS=stopping", b"WATCHDOG=1"]
    manager.close()
    manager.close()


@pytest.mark.parametrize("more", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}])
def test_no_sign_of_life_that_nobody_waits_for(listener: socket.socket, more: dict[str, str]) -> None:
    manager = ServiceManager.from_environ(environ(listener, **more))
    manager.ready("serves", lambda: True)
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    manager.close()


def test_variables_are_taken_away(listener: socket.socket) -> None:
    variables = environ(listener, WATCHDOG_USEC="1", WATCHDOG_PID="2", HOME="/")
    ServiceManager.from_environ(variables).close()
    assert variables == {"HOME": "/"}


def test_without_a_manager_nothing_is_sent() -> None:
    manager = ServiceManager.from_environ({"WATCHDOG_USEC": "1000"})
    manager.status("reading weights")
    manager.ready("serves", lambda: True)
    manager.stopping()
    manager.close()


def test_a_manager_that_is_gone_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager.from_environ({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    with caplog.at_level(logging.WARNING):
        manager.status("reading weights")
        manager.stopping()
    (record,) = caplog.records
    assert "NOTIFY_SOCKET does not hear this process: No such file" in record.getMessage()
    manager.close()
