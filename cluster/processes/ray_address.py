"""A quick check that a Ray answers at an address. Ray itself would try for more than a minute."""

import os
import socket

import grpc

from tandem.cluster.errors import StartFailed

CONNECT_SECONDS = 5.0
METHOD = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"  # every Ray has it, and may ask for a token first
ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))


def check_ray_answers(address: str, asked: str) -> None:
    """StartFailed unless a Ray answers. address: HOST:PORT as it was given; asked: the HOST that Ray would ask."""
    try:
        port = int(address.rpartition(":")[2])
        socket.create_connection((asked, port), CONNECT_SECONDS).close()
        found = "" if os.environ.get("RAY_USE_TLS") == "1" else _what_is_no_ray(asked, port)
    except (OSError, ValueError, OverflowError) as error:
        found = str(error)
    if found:
        raise StartFailed(
            f"--address is {address!r}: {found}; HOST:PORT of a Ray that runs is accepted, or auto for this machine's"
        )


def _what_is_no_ray(host: str, port: int) -> str:
    """What listens there in place of a Ray; empty for a Ray."""
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        try:
            channel.unary_unary(METHOD)(b"", timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            if code in ANSWERS:
                return ""
            if code == grpc.StatusCode.UNIMPLEMENTED:
                return "what listens there is a gRPC server, and no Ray"
            return f"what listens there is no Ray: asked for its nodes, it did not answer as one ({code.name})"
    return ""
