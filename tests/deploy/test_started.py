"""The RayCluster's container command, run on this machine's processor: its probes, a request, and its preStop."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, cache_folder
from tandem.cluster.credentials import is_loopback
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.deploy import dockerfile, manifest
from tests.deploy.known import DEPLOY
from tests.support.free_ports import free_ports
from tests.support.http_client import COMPLETIONS
from tests.support.waiting import until

IMAGE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFEST = manifest.read((DEPLOY / "kubernetes" / "raycluster.yaml").read_text(encoding="utf-8"))
SECONDS = 100.0
# What differs from the Pod: a processor and no GPU, any port, and this machine's own address.
HERE = {
    "TANDEM_ISLAND__DEVICE": "cpu",
    "TANDEM_ISLAND__TRANSPORT": "shared_memory",
    "TANDEM_ISLAND__THREADS_PER_WORKER": "1",
    "TANDEM_CACHE__NUM_PAGES": "64",
    "TANDEM_GATEWAY__HOST": "127.0.0.1",
    "TANDEM_GATEWAY__PORT": "0",
    "TANDEM_GATEWAY__HTTP_PORT": "0",
    "TANDEM_GATEWAY__PROCESSES": "1",
    "TANDEM_GATEWAY__DRAIN_SECONDS": "2.0",
    "TANDEM_METRICS__HOST": "127.0.0.1",
    "TANDEM_METRICS__PORT": "0",
}


@dataclass(frozen=True)
class Container:
    """A running command. addresses: HOST:PORT by the names of the line `ready`."""

    process: subprocess.Popen[str]
    addresses: dict[str, str]
    environ: dict[str, str]
    ray_folder: str

    def asked(self, path: str) -> int:
        """The status of a probe, which does not check the certificate."""
        return httpx.get(f"https://{self.addresses['metrics']}{path}", verify=False, trust_env=False).status_code

    @property
    def ray(self) -> list[psutil.Process]:
        """Ray's processes, whoever their parent is now. The server for Ray's own clients knows only the address."""
        found = list[psutil.Process]()
        address = f"--address={self.environ['RAY_ADDRESS']}"
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(self.ray_folder in word or word == address for word in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return found


def certify(folder: Path) -> dict[str, str]:
    issued = trustme.CA().issue_cert("localhost", "127.0.0.1")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    return {"TANDEM_SECURITY__TLS_CERT": str(certificate), "TANDEM_SECURITY__TLS_KEY": str(key)}


def environment(folder: Path, model: Path, ray_folder: str) -> dict[str, str]:
    """Returns the environment that the image, the manifest and KubeRay give the container, and HERE."""
    gcs, *others = map(str, free_ports(4))
    names = ("dashboard-agent-listen-port", "metrics-export-port", "ray-client-server-port")
    options = dict(zip(names, others, strict=True))
    options |= {"port": gcs, "num-cpus": "2", "num-gpus": "0", "temp-dir": ray_folder}
    image = dockerfile.stages(IMAGE)[-1].environment
    return {
        **{name: value for name, value in image.items() if name.startswith("RAY_")},
        **HERE,
        **certify(folder),
        **{name: os.environ[name] for name in ("PYTHONPATH", "PYTHONWARNINGS") if name in os.environ},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        KERNEL_CACHE: str(cache_folder()),  # as the image gives a folder; not an empty one
        "XDG_RUNTIME_DIR": str(folder),
        "TANDEM_MODEL__PATH": str(model),
        "TANDEM_SECURITY__API_KEY": manifest.SECRET,
        manifest.START: MANIFEST.ray_start(**options),
        "RAY_ADDRESS": f"127.0.0.1:{gcs}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@contextmanager
def container(folder: Path, model: Path) -> Iterator[Container]:
    ray_folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie there: a short path
    environ = environment(folder, model, ray_folder)
    (folder / manifest.CONFIG).write_text(MANIFEST.config_text, encoding="utf-8")
    script = MANIFEST.script.replace("/etc/tandem/", f"{folder}/")
    command = [*MANIFEST.container["command"][2:], script]  # without tini
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running = Container(process, {}, environ, ray_folder)
    try:
        running.addresses.update(_ready(process))
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        gone = running.ray  # in a container they end with its first process
        for one in gone:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(gone, timeout=10)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _ready(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    said = list[str]()
    for line in process.stdout:
        if line.startswith("ready "):
            return dict(pair.split("=") for pair in line.split()[1:])
        said.append(line)
    raise AssertionError(f"no line `ready` but {''.join(said)}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", arch="llama", size="tiny", seed=3)
    return tmp_path / "model"


@pytest.mark.long
def test_probes_are_answered_and_pre_stop_drains(tmp_path: Path, model: Path) -> None:
    with container(tmp_path, model) as running:
        probes = {name: MANIFEST.container[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
        until(lambda: running.asked(probes["readinessProbe"]) == 200)
        assert running.asked(probes["livenessProbe"]) == 200
        headers = {"authorization": f"Bearer {manifest.SECRET}"}
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        url = f"https://{running.addresses['http']}{COMPLETIONS}"
        answer = httpx.post(url, json=body, headers=headers, verify=False, trust_env=False, timeout=SECONDS)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4)
        assert httpx.post(url, json=body, verify=False, trust_env=False).status_code == 401

        sockets = [one for process in running.ray for one in process.net_connections("inet")]
        listening = {one.laddr.ip for one in sockets if one.status == "LISTEN"}
        assert listening
        assert [ip for ip in listening if not is_loopback(ip.removeprefix("::ffff:"))] == []

        command = MANIFEST.container["lifecycle"]["preStop"]["exec"]["command"]
        stopping = subprocess.Popen(command, env=running.environ, stdout=subprocess.PIPE, text=True)
        until(lambda: running.asked(probes["readinessProbe"]) == 503)
        assert running.asked(probes["livenessProbe"]) == 200
        assert stopping.communicate(timeout=SECONDS)[0] == "stopped tandem\n"
        assert running.process.wait(SECONDS) == 0
