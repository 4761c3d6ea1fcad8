"""Tokens and TLS through the gateway's frontends: who has none is refused, whatever is called."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.runtime_dir import ClusterLock
from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity, ServerSecurity, read_token
from tandem.cluster.errors import ConfigError, Unauthenticated, Unavailable
from tandem.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tandem.workers.ports.authentication import HEADER, authorized
from tests.cluster.open_gateway import open_gateway
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY
from tests.support.http_client import get as http_get
from tests.support.http_client import refused as http_refused
from tests.support.island import Island, running_island

TOKEN = "0123456789abcdef-token"
PROMPT = [5, 6, 7]


def private(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


class Authority:
    """A certificate authority, and files that it signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(folder / "ca.pem")
        self.ca = str(folder / "ca.pem")

    def issue(self, name: str) -> tuple[str, str]:
        """Paths of a certificate and its key."""
        issued = self._ca.issue_cert(name)
        certificate = self._folder / "cert.pem"
        certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return str(certificate), private(self._folder / "key.pem", issued.private_key_pem.bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return save_checkpoint("llama", folder / "llama")


@pytest.fixture(scope="module")
def token_file(folder: Path) -> str:
    return private(folder / "token", TOKEN.encode() + b"\n")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Authority:
    return Authority(folder / "servers")


@pytest.fixture(scope="module")
def clients(folder: Path) -> Authority:
    return Authority(folder / "clients")


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, token_file: str) -> Iterator[Island]:
    with running_island(checkpoint, {"security.token_file": token_file, "gateway.http_port": 0}) as island:
        yield island


@pytest.fixture(scope="module")
def mutual(checkpoint: Path, token_file: str, servers: Authority, clients: Authority) -> Iterator[Island]:
    certificate, key = servers.issue("127.0.0.1")
    security = {"token_file": token_file, "tls_cert": certificate, "tls_key": key, "client_ca": clients.ca}
    overrides: dict[str, Any] = {f"security.{name}": value for name, value in security.items()}
    overrides["gateway.http_port"] = 0
    with running_island(checkpoint, overrides) as island:
        yield island


def generate(island: Island, security: ClientSecurity) -> int:
    with Client(island.address, security) as client:
        return sum(len(update.token_ids) for update in client.generate(PROMPT, max_tokens=3, timeout=10, **GREEDY))


def test_the_right_token_is_admitted(guarded: Island) -> None:
    assert generate(guarded, ClientSecurity(token=TOKEN)) == 3


@pytest.mark.parametrize("token", [None, "another-token-of-some-length", TOKEN + "x", TOKEN[:-1]])
def test_no_other_token_is(guarded: Island, token: str | None) -> None:
    with pytest.raises(Unauthenticated, match="bearer token"):
        generate(guarded, ClientSecurity(token=token))


def test_every_method_is_denied_but_health(guarded: Island) -> None:
    def code(call: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        return caught.value.code()

    with grpc.insecure_channel(guarded.address) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        unknown = channel.unary_unary("/tandem.v1.Inference/NoSuchMethod")
        for call in (
            lambda: list(inference.Generate(inference_pb2.GenerateRequest(), timeout=5)),
            lambda: inference.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=5),
            lambda: inference.GetClusterInfo(inference_pb2.GetClusterInfoRequest(), timeout=5),
            lambda: admin_pb2_grpc.AdminStub(channel).Scale(admin_pb2.ScaleRequest(num_decode=1), timeout=5),
            lambda: list(reflect(iter([listing]), timeout=5)),
            lambda: unknown(b"", timeout=5),
            lambda: inference.GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=5, metadata=((HEADER, f"Bearer {TOKEN}"),) * 2
            ),
        ):
            assert code(call) == grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_route_is_denied_but_health_and_pages_without_facts(guarded: Island) -> None:
    right = ("authorization", f"Bearer {TOKEN}")
    with httpx.Client(base_url=f"http://{guarded.http}", trust_env=False) as client:
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("GET", "/docs/more"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/health/more"),
        ):
            for headers in ([], [("authorization", TOKEN)], [("authorization", f"Bearer {TOKEN}x")], [right, right]):
                answer = client.request(method, path, headers=headers)
                assert "bearer token" in http_refused(answer, 401)["message"]
                assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == client.get("/").status_code == 200
        assert client.get("/v1/models", headers=[right]).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 3, **GREEDY}
        answer = client.post("/v1/completions", json=body, headers=[right])
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_workers_answer_their_gateway_only(guarded: Island) -> None:
    worker = guarded.workers[0]
    with grpc.insecure_channel(worker.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            worker_pb2_grpc.WorkerStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=5)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        stub = authorized(worker_pb2_grpc.WorkerStub(channel), worker.config.token)
        assert stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=5).alive
    assert worker.config.token not in repr(worker.config)


def test_mutual_tls(mutual: Island, servers: Authority, clients: Authority) -> None:
    certificate, key = clients.issue("somebody")
    own = {"tls_cert": certificate, "tls_key": key}
    assert generate(mutual, ClientSecurity(token=TOKEN, tls_ca=servers.ca, **own)) == 3
    with pytest.raises(Unauthenticated):
        generate(mutual, ClientSecurity(tls_ca=servers.ca, **own))
    for stranger in (
        ClientSecurity(token=TOKEN),  # in the clear
        ClientSecurity(token=TOKEN, tls_ca=servers.ca),  # shows no certificate
        ClientSecurity(token=TOKEN, tls_ca=clients.ca, **own),  # does not believe the gateway
    ):
        with pytest.raises(Unavailable):
            generate(mutual, stranger)


def test_mutual_tls_over_http(mutual: Island, servers: Authority, clients: Authority) -> None:
    url = f"https://{mutual.http}/v1/models"
    trusting = ssl.create_default_context(cafile=servers.ca)
    with pytest.raises(httpx.TransportError):  # it shows no certificate
        httpx.get(url, verify=trusting, trust_env=False)
    with pytest.raises(httpx.TransportError):  # in the clear
        httpx.get(url.replace("https", "http"), trust_env=False)
    trusting.load_cert_chain(*clients.issue("somebody"))
    http_refused(httpx.get(url, verify=trusting, trust_env=False), 401)
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert httpx.get(url, verify=trusting, headers=headers, trust_env=False).status_code == 200
    stranger = ssl.create_default_context(cafile=clients.ca)  # does not believe the gateway
    stranger.load_cert_chain(*clients.issue("somebody"))
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, verify=stranger, headers=headers, trust_env=False)


def test_the_command_line_takes_token_and_certificates(
    mutual: Island, token_file: str, servers: Authority, clients: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = clients.issue("somebody")
    options = ["--token-file", token_file, "--tls-ca", servers.ca, "--tls-cert", certificate, "--tls-key", key]
    with pytest.raises(SystemExit) as ended:
        main(["status", "--address", mutual.address, *options])
    assert ended.value.code == 0
    assert "prefill" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.usefixtures("runtime_folder")
def test_a_gateway_that_listens_everywhere_is_found_by_a_name(
    checkpoint: Path, token_file: str, servers: Authority, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    """The certificate cannot name the address that the gateway listens on."""
    certificate, key = servers.issue("localhost")
    security = {"security.token_file": token_file, "security.tls_cert": certificate, "security.tls_key": key}
    with running_island(checkpoint, {"gateway.host": host, **security}) as island, ClusterLock("mine") as lock:
        lock.publish(island.address, {})
        with pytest.raises(SystemExit) as ended:
            main(["status", "--token-file", token_file, "--tls-ca", servers.ca])
    assert ended.value.code == 0
    assert "prefill" in capsys.readouterr().out


def test_behind_a_proxy_a_gateway_serves_plainly_and_asks_for_its_token(checkpoint: Path) -> None:
    options = {"gateway.host": "0.0.0.0", "security.api_key": TOKEN, "security.tls_at_proxy": True}
    with open_gateway(checkpoint, options) as opened:
        address = opened.http.replace("0.0.0.0", "127.0.0.1")
        host = {"host": "tandem.example"}  # which the proxy passes on
        http_refused(http_get(address, "/v1/models", headers=host), 401)
        headers = host | {"authorization": f"Bearer {TOKEN}"}
        assert http_get(address, "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"short", 0o600, "holds 5 characters; it must hold at least 16"),
        (b"", 0o600, "holds 0 characters"),
        (b"with a space in the middle", 0o600, "without spaces"),
        (TOKEN.encode(), 0o644, "mode 644; others must not read it"),
        (TOKEN.encode(), 0o640, "mode 640; others must not read it"),
        (TOKEN.encode(), 0o602, "mode 602; others must not read it"),
    ],
)
def test_bad_token_files(tmp_path: Path, content: bytes, mode: int, message: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        read_token(path, "--token-file")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "none", "--token-file")


def test_files_that_are_no_certificates_are_refused(tmp_path: Path, servers: Authority, clients: Authority) -> None:
    certificate, key = servers.issue("127.0.0.1")
    other = clients.issue("127.0.0.1")[1]
    garbage = private(tmp_path / "garbage.pem", b"no PEM")
    ServerSecurity(tls_cert=certificate, tls_key=key, client_ca=clients.ca).check()
    for refused, message in (
        (
            ServerSecurity(tls_cert=garbage, tls_key=key),
            "tls_cert .*garbage.pem and tls_key .* must be a certificate",
        ),
        (ServerSecurity(tls_cert=certificate, tls_key=garbage), "tls_key .*garbage.pem must be a certificate and its"),
        (ServerSecurity(tls_cert=certificate, tls_key=other), "must be a certificate and its key"),
        (ServerSecurity(tls_cert=certificate, tls_key=key, client_ca=garbage), "security.client_ca .* must hold cert"),
        (ServerSecurity(token_file=garbage), "token_file .* holds 6 characters"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused.check()
    Path(key).chmod(0o640)
    with pytest.raises(ConfigError, match=r"security\.tls_key .* has mode 640; others must not read it"):
        ServerSecurity(tls_cert=certificate, tls_key=key).check()
    with pytest.raises(ConfigError, match=r"tls_ca .*garbage\.pem must hold certificates"):
        Client("example.org:50051", ClientSecurity(tls_ca=garbage))


@pytest.mark.parametrize(
    ("security", "message"),
    [
        (ClientSecurity(token=TOKEN), "without TLS a token is not sent to example.org:50051"),
        (ClientSecurity(tls_cert="c"), "tls_cert and tls_key: give both or neither"),
        (ClientSecurity(tls_cert="c", tls_key="k"), "tls_ca is missing"),
        (ClientSecurity(tls_ca="/none.pem"), "tls_ca is /none.pem, which cannot be read"),
    ],
)
def test_a_client_that_cannot_be_secured_is_refused(security: ClientSecurity, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Client("example.org:50051", security)
