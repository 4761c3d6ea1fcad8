"""A server that ends is noticed; one that only closes a connection is not lost."""

import socket
from concurrent.futures import Future

import pytest

from tandem.cluster.processes.port_watch import PortWatch

SECONDS = 30.0


class Lost(Future[str]):
    """The name of the server that was lost."""


def watch(servers: dict[str, socket.socket], lost: Lost) -> PortWatch:
    there = {name: server.getsockname() for name, server in servers.items()}
    return PortWatch(there, 0.1, lost.set_result)


def test_the_server_that_ends_is_named() -> None:
    lost = Lost()
    with socket.create_server(("127.0.0.1", 0)) as gcs, socket.create_server(("127.0.0.1", 0)) as raylet:
        watching = watch({"GCS": gcs, "raylet": raylet}, lost)
        held = [gcs.accept()[0], raylet.accept()[0]]
        raylet.close()
        held[1].close()
        assert lost.result(SECONDS) == "raylet"
        watching.close()
        held[0].close()


def test_a_connection_that_the_server_closes_is_made_again() -> None:
    lost = Lost()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        watching = watch({"GCS": server}, lost)
        for _ in range(3):
            server.accept()[0].close()
        last, _ = server.accept()
        with last:
            assert not lost.done()
            watching.close()
            assert last.recv(1) == b""
    assert not lost.done()


def test_a_server_that_has_ended_before() -> None:
    lost = Lost()
    server = socket.create_server(("127.0.0.1", 0))
    name = server.getsockname()
    server.close()
    PortWatch({"GCS": name}, 0.1, lost.set_result)
    assert lost.result(SECONDS) == "GCS"


def test_what_a_server_says_is_not_its_end() -> None:
    lost = Lost()
    with socket.create_server(("127.0.0.1", 0)) as server:
        watching = watch({"GCS": server}, lost)
        one, _ = server.accept()
        one.sendall(b"settings")
        with pytest.raises(TimeoutError):
            lost.result(0.2)
        watching.close()
        one.close()
