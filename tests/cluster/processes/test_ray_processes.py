import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import ray.util

from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import StartFailed
from tandem.cluster.processes.ray_access import check_ray_answers, hide_token
from tandem.cluster.processes.ray_processes import RayProcesses
from tests.cluster.fake_gateway import FakeGateway, serving


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "127.0.0.1:ray", "127.0.0.1:70000", "ray://x:1"])
def test_an_address_without_a_ray_is_refused_before_ray_tries_it(address: str) -> None:
    with pytest.raises(StartFailed, match=f"^--address is '{address}': .*; give HOST:PORT of a running Ray"):
        RayProcesses(address).start("c", None)


@pytest.mark.skipif(is_loopback(ray.util.get_node_ip_address()), reason="this machine has no other address")
def test_a_service_of_this_machine_alone_is_no_ray() -> None:
    """A gateway is one such: Ray would ask at the address that other machines know, for two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        address = f"127.0.0.1:{service.getsockname()[1]}"
        with pytest.raises(StartFailed, match="give HOST:PORT of a running Ray"):
            RayProcesses(address).start("c", None)


def test_a_grpc_server_that_is_no_ray_is_refused() -> None:
    with (
        serving(FakeGateway()) as address,
        pytest.raises(StartFailed, match="is a gRPC server, and no Ray; give HOST:PORT"),
    ):
        check_ray_answers(address, "127.0.0.1")


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b""])
def test_what_speaks_otherwise_is_refused(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that says nothing at all is refused, too."""
    monkeypatch.setattr("tandem.cluster.processes.ray_access.CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        taken: list[socket.socket] = []

        def answer() -> None:
            with suppress(OSError):  # the listener is closed
                while True:
                    taken.append(listener.accept()[0])
                    taken[-1].sendall(said)

        pool.submit(answer)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartFailed, match=r"what listens there is no Ray: .*; give HOST:PORT of a running Ray"):
            check_ray_answers(address, "127.0.0.1")
        listener.shutdown(socket.SHUT_RDWR)
        for one in taken:
            one.close()


@pytest.mark.parametrize(
    ("there", "gpus", "error"),
    [({"CPU": 8.0, "GPU": 3.0}, 1, "0.4 CPUs and 4 GPUs are needed; Ray has 8 CPUs and 3 GPUs"),
     ({"CPU": 0.3}, 0, "0.4 CPUs are needed; Ray has 0.3 CPUs and 0 GPUs")],
)  # fmt: skip
def test_more_than_ray_has(there: dict[str, float], gpus: int, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said of all islands together, before the first one is placed."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    RayProcesses().check_room(3, gpus=gpus)
    with pytest.raises(StartFailed, match=f"^{error}$"):
        RayProcesses().check_room(4, gpus=gpus)


def test_starting_ray_hides_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"

    def init(**_: object) -> None:
        token.parent.mkdir()
        token.write_text("secret")
        token.chmod(0o644)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray.util, "list_named_actors", list)
    RayProcesses().start("c", None)
    assert token.stat().st_mode & 0o777 == 0o600


def test_the_token_that_ray_leaves_readable_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    hide_token()  # where there is none, nothing comes of it
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    hide_token()
    assert token.stat().st_mode & 0o777 == 0o600
