"""Tests who may call a worker that its cluster's certificates identify."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tandem.cluster.supervision.authority import Authority
from tandem.workers.ports.tls import SERVER_NAME, Identity

ANSWER = b"served"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("c" * 100)


@pytest.fixture(scope="module")
def address(authority: Authority) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: ANSWER)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"m": handler}),))
    port = server.add_secure_port("127.0.0.1:0", authority.worker().server_credentials())
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def call(address: str, credentials: grpc.ChannelCredentials | None) -> bytes:
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    made = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=options)
    )
    with made as channel:
        return channel.unary_unary("/s/m")(b"", timeout=5)


def test_a_gateway_is_served(address: str, authority: Authority) -> None:
    assert call(address, authority.gateway().channel_credentials()) == ANSWER


@pytest.mark.parametrize("who", ["plain", "no certificate", "a worker", "another cluster", "another cluster's worker"])
def test_others_are_refused(who: str, address: str, authority: Authority) -> None:
    ours, theirs = authority.gateway(), Authority("c").gateway()
    foreign = Identity(ours.authority, theirs.certificate, theirs.key)
    credentials = {
        "plain": None,
        "no certificate": grpc.ssl_channel_credentials(ours.authority),
        "a worker": authority.worker().channel_credentials(),
        "another cluster": foreign.channel_credentials(),
        "another cluster's worker": theirs.channel_credentials(),  # it does not trust this one either
    }[who]
    with pytest.raises(grpc.RpcError) as caught:
        call(address, credentials)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_keys_are_not_shown(authority: Authority) -> None:
    assert "PRIVATE" not in repr(authority.worker())
