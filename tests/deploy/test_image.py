"""deploy/Dockerfile: what it copies is there, no user has rights, and HEALTHCHECK says whether it is ready."""

import asyncio
import re
import shutil
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
import trustme
from packaging.requirements import Requirement

from tandem.cluster.cli.kernels.plan import TARGETS
from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.frontends.http.app import HttpApp
from tandem.cluster.frontends.http.monitoring import Monitoring
from tandem.cluster.frontends.http.server import HttpServer
from tandem.cluster.keys.gate import Gate
from tandem.cluster.requests.call_limit import CallLimit
from tests.deploy.dockerfile import findings, healthcheck, stages
from tests.deploy.known import DEPLOY, EXTRAS, PINS, PROJECT, VERSION

TEXT = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8")


def test_the_dockerfile_is_true() -> None:
    assert findings(TEXT, IGNORED) == []
    assert f"-t tandem:{VERSION} " in TEXT
    assert f"-t tandem:{VERSION}-cuda13 " in TEXT
    assert set(re.findall(r"--build-arg GPU=(\w+)", TEXT)) <= set(TARGETS)
    assert {extra for line in re.findall(r"--build-arg EXTRAS=(\S+)", TEXT) for extra in line.split(",")} <= EXTRAS


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("COPY workers workers", "COPY works works", "COPY works: there is no such file"),
        ("COPY workers workers", "COPY docs docs", "COPY docs: the .dockerignore leaves it out"),
        ("--from=kernels", "--from=cubins", "no earlier stage"),
        ("USER 10001:10001", "USER root", "unprivileged"),
        ("USER 10001:10001\n", "", "unprivileged"),
        (' "tandem"]', ' "tandom"]', "tandom is none of the project's scripts"),
        ('CMD ["up"', 'CMD ["upp"', "none of the commands"),
        ("/etc/tandem/local.yaml", "/etc/tandem/lokal.yaml", "no such file in deploy/"),
        ("--output /var", "--outputs /var", "--outputs"),
        ("curl gcc libc6-dev", "gcc libc6-dev", "curl is not installed"),
        ("9090/ready", "9090/health", "HEALTHCHECK"),
        ("TANDEM_METRICS__PORT=9090", "TANDEM_METRICS__PORT=9091", "HEALTHCHECK"),
        ("RAY_worker_niceness=0", "RAY_worker_niceness=15", "Ray's settings"),
        ("pip install -c constraints.txt setuptools", "pip install setuptools", "not pinned"),
        ("constraints.txt setuptools", "constraints.txt wheel", "does not pin it"),
        ("EXTRAS=tracing\nENV", "EXTRAS=tracing,fast\nENV", "ARG EXTRAS=tracing,fast"),
        ("ARG GPU=", "ARG PIP_TOKEN=\nARG GPU=", "secret"),
        ("then \\", "than \\", "syntax error"),
        ("BUILD_BASE=ubuntu:24.04", "BUILD_BASE=ubuntu", "no tag"),
        ("WORKDIR /source", "WORKDIRS /source", "WORKDIRS is no instruction"),
        ("EXPOSE 50051", "EXPOSE 50052", "EXPOSE"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in TEXT
    assert any(finding in found for found in findings(TEXT.replace(before, after), IGNORED))


def test_torch_and_the_pins_ask_for_one_triton() -> None:
    """pip installs nothing where a CUDA build of torch asks for another version than constraints.txt has."""
    asked = [Requirement(text) for text in requires("torch") or () if text.startswith("triton")]
    assert all(one.specifier.contains(PINS["triton"]) for one in asked)
    assert (PINS["torch"], PINS["triton"]) == ("2.13.0", "3.7.1"), "which one does this torch ask for?"
    project = PROJECT["project"]
    named = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    assert not [text for text in named if "triton==" in text]


def test_a_context_that_takes_everything_is_found() -> None:
    assert any("everything" in found for found in findings(TEXT, IGNORED.replace("**\n", "", 1)))


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_no_error() -> None:
    subprocess.run(["hadolint", "--failure-threshold", "error", DEPLOY / "Dockerfile"], check=True, timeout=60)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("tls", [False, True])
def test_the_healthcheck_tells_ready_from_alive(tls: bool, tmp_path: Path) -> None:
    assert asyncio.run(_codes("", _security(tmp_path) if tls else ServerSecurity())) == 0
    assert asyncio.run(_codes("no island serves", _security(tmp_path) if tls else ServerSecurity())) == 1


async def _codes(unready: str, security: ServerSecurity) -> int:
    """Exit code of the HEALTHCHECK beside a gateway."""
    monitoring = Monitoring(lambda: unready, None, public=False)
    app = HttpApp({}, monitoring, limit=CallLimit(1), gate=Gate(None, None), rejected=lambda status: None)
    server = HttpServer(app, "127.0.0.1", 0, security, shared=False)
    port = (await server.start()).rpartition(":")[2]
    try:
        command = re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", healthcheck(stages(TEXT)[-1]))
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        return await asyncio.wait_for(process.wait(), 20)
    finally:
        await server.stop(0.0)


def _security(folder: Path) -> ServerSecurity:
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    key.chmod(0o600)
    return ServerSecurity(tls_cert=str(certificate), tls_key=str(key))
