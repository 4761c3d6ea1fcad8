"""A server that ends is noticed; one that only closes a connection is not lost."""

import socket
import threading
from collections.abc import Callable

from tandem.cluster.processes.port_watch import PortWatch
from tests.support.waiting import until

SECONDS = 30.0
ANY = ("127.0.0.1", 0)


def watch(server: socket.socket, lost: Callable[[], None], back: Callable[[], bool] | None = None) -> PortWatch:
    return PortWatch(server.getsockname(), 0.1, lost, back)


def end(server: socket.socket, held: socket.socket) -> None:
    server.close()
    held.close()


def test_the_end_of_a_server_is_noticed() -> None:
    lost = threading.Event()
    with socket.create_server(ANY) as server:
        watch(server, lost.set)
        end(server, server.accept()[0])
        assert lost.wait(SECONDS)


def test_a_connection_that_the_server_closes_is_made_again() -> None:
    lost = threading.Event()
    with socket.create_server(ANY) as server:
        server.settimeout(SECONDS)
        watching = watch(server, lost.set)
        for _ in range(3):
            server.accept()[0].close()
        last, _ = server.accept()
        with last:
            assert not lost.is_set()
            watching.close()
            assert last.recv(1) == b""
    assert not lost.is_set()


def test_a_server_that_has_ended_before() -> None:
    lost = threading.Event()
    server = socket.create_server(ANY)
    name = server.getsockname()
    server.close()
    PortWatch(name, 0.1, lost.set)
    assert lost.wait(SECONDS)


def test_what_a_server_says_is_not_its_end() -> None:
    lost = threading.Event()
    with socket.create_server(ANY) as server:
        watching = watch(server, lost.set)
        one, _ = server.accept()
        one.sendall(b"settings")
        assert not lost.wait(0.2)
        watching.close()
        one.close()


def test_a_server_that_is_back_is_watched_again_once_it_is_the_one_that_was_lost() -> None:
    losses: list[str] = []
    answers = [True, False, False]
    with socket.create_server(ANY) as server:
        name = server.getsockname()
        watching = watch(server, lambda: losses.append("lost"), lambda: answers.pop())
        end(server, server.accept()[0])
        until(lambda: losses == ["lost"])
    with socket.create_server(name) as server:
        held = [server.accept()[0] for _ in range(3)]
        until(lambda: not answers)
        end(server, held.pop())
        until(lambda: losses == ["lost", "lost"])
        watching.close()
        for one in held:
            one.close()


def test_a_host_that_is_gone_is_probed_for_and_a_busy_server_is_not_gone() -> None:
    """The kernel asks after seconds of silence, and answers for a process that does not."""
    with socket.create_server(ANY) as server:
        watching = watch(server, lambda: None)
        held, _ = server.accept()
        until(lambda: _probes(server.getsockname()[1]))
        watching.close()
        held.close()


def _probes(port: int) -> bool:
    """Returns whether the watch's end of the connection has a timer of probes."""
    with open("/proc/net/tcp", encoding="ascii") as connections:
        lines = [line.split() for line in connections]
    return any(line[2].endswith(f":{port:04X}") and line[5].startswith("02:") for line in lines)
