"""Access to a Ray: a quick check of its address, and the token that it asks for.

This file does not import Ray, which reads its environment when it is imported, and tries an address for a minute.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import StartFailed

GIVEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CONNECT_SECONDS = 5.0
METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"  # every Ray has it, and may ask for a token first
ANSWERS = ("OK", "UNAUTHENTICATED", "PERMISSION_DENIED")
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))


def asked_host(address: str, known: str) -> str:
    """Returns the HOST at which to ask for a Ray at `address`. known: this machine's address for other machines.

    A Ray on this machine is asked at `known`, unless it listens on loopback only, as the Ray of `tandem up` does.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not is_loopback(host):
        return host
    with suppress(OSError, ValueError, OverflowError):
        socket.create_connection((known, int(port)), CONNECT_SECONDS).close()
        return known
    return host


def machine_address() -> str:
    """Returns this machine's address for other machines, by the route to them. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("8.8.8.8", 80))
        return probe.getsockname()[0]
    return "127.0.0.1"


def check_ray_answers(address: str, asked: str) -> None:
    """StartFailed unless a Ray answers. address: HOST:PORT as it was given; asked: the HOST that Ray would ask."""
    try:
        port = int(address.rpartition(":")[2])
        socket.create_connection((asked, port), CONNECT_SECONDS).close()
        found = "" if os.environ.get("RAY_USE_TLS") == "1" else _what_is_no_ray(asked, port)
    except OSError as error:
        found = error.strerror or "no answer"  # a timeout has no text
    except (ValueError, OverflowError):
        found = "it has no port"
    if found:
        raise StartFailed(
            f"--address is {address!r}: {found}; give HOST:PORT of a running Ray, or auto for this machine's"
        )


def _what_is_no_ray(host: str, port: int) -> str:
    """Describes what listens there in place of a Ray; empty for a Ray."""
    import grpc

    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            code: str = error.code().name  # type: ignore[attr-defined]
            if code in ANSWERS:
                return ""
            if code == "UNIMPLEMENTED":
                return "what listens there is a gRPC server, and no Ray"
            return f"what listens there is no Ray: asked for its nodes, it did not answer as one ({code})"
    return ""


@contextmanager
def token_shown() -> Iterator[None]:
    """Makes a Ray that is imported meanwhile show this user's token to a Ray at a given address, too.

    By default it does so only to a Ray that it has started or found. RAY_AUTH_MODE decides if it is set.
    """
    name, known = "RAY_AUTH_MODE", _file().exists() or any(given in os.environ for given in GIVEN)
    if name in os.environ or not known:
        yield
        return
    os.environ[name] = "token"
    try:
        yield
    finally:
        del os.environ[name]


def hide_token() -> None:
    """Makes Ray's token file private. Ray leaves it readable for everybody."""
    with suppress(OSError):
        _file().chmod(0o600)


def _file() -> Path:
    """Returns the path of Ray's own token."""
    return Path.home() / ".ray" / "auth_token"
