import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.cluster import cli, doctor
from tandem.cluster.doctor import Finding, examine

SMI = """#!/bin/sh
case "$*" in
*driver_version*) echo 580.1; echo 580.1 ;;
*topo*) printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-31\\nGPU1\\tNV18\\t X \\t0-31\\n' ;;
esac
"""


def findings(port: int = 0) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(port)}


def gpus(count: int, *, apart: tuple[int, int] | None = None) -> Callable[[], SimpleNamespace]:
    cuda = SimpleNamespace(
        device_count=lambda: count,
        get_device_name=lambda index: "H200",
        can_device_access_peer=lambda i, j: (i, j) != apart,
    )
    return lambda: SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))


def no_package(name: str) -> str:
    raise doctor.PackageNotFoundError(name)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing on the PATH, no package, no torch, no /dev/shm."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "version", no_package)
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails

    def no_shm(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(doctor.os, "statvfs", no_shm)


@pytest.mark.usefixtures("bare")
def test_a_machine_without_anything() -> None:
    found = findings()
    missing = {name for name, finding in found.items() if not finding.ok}
    assert missing == set(found) - {"python", "port 0"}
    assert all(found[name].advice for name in missing)


@pytest.mark.usefixtures("bare")
def test_the_command_exits_with_0_and_prints_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(findings())
    assert all(line.startswith(("ok ", "missing ")) for line in lines)
    (nvcc,) = [line for line in lines if "nvcc" in line]
    assert "install the CUDA toolkit" in nvcc


def test_a_gpu_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "_torch", gpus(2))
    found = findings()
    assert found["nvidia driver"] == Finding("nvidia driver", True, "580.1")
    assert found["gpus"].found == "2 × H200"
    assert found["peer to peer"] == Finding("peer to peer", True, "all 2 pairs (NV18)")
    monkeypatch.setattr(doctor, "_torch", gpus(3, apart=(2, 0)))
    pairs = findings()["peer to peer"]
    assert (pairs.ok, pairs.found) == (False, "not 2→0")


def test_packages_are_found_under_the_name_of_their_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("nvshmem4py-cu12", "torch"):
            return "1.2"
        return no_package(name)

    monkeypatch.setattr(doctor, "version", version)
    found = findings()
    assert [found[name].ok for name in ("nvshmem4py", "torch", "ray")] == [True, True, False]
    assert found["nvshmem4py"].found == "1.2"


def test_a_taken_port() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = findings(port)[f"port {port}"]
    assert not taken.ok
    assert "--grpc-port" in taken.advice


def test_a_tool_that_hangs_or_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("nvidia-smi", "exec sleep 30"), ("nvcc", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "COMMAND_SECONDS", 0.2)
    found = findings()
    assert not found["nvidia driver"].ok
    assert found["nvcc"].found.endswith("nvcc")
