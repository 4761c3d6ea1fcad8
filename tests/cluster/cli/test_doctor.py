import json
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cache.kernels.build import nvml
from tandem.cache.kernels.build.nvml import Driver, Gpu
from tandem.cache.kernels.flashinfer import served_version
from tandem.cache.kernels.flashinfer.wrappers import load_flashinfer
from tandem.cluster.cli import commands as cli
from tandem.cluster.cli import rank_room
from tandem.cluster.cli.doctor import checks as doctor
from tandem.cluster.cli.doctor.checks import Finding, examine, verdicts
from tandem.cluster.cli.doctor.report import Needs
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.transfer.nvshmem.kernels import device_build

H200 = Gpu("H200", 139 << 30, (9, 0), 132)


def findings(port: int = 0) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(port, nvml.read_driver())}


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


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
    """Makes a bare host: nothing on the PATH, no package, no torch, no /dev/shm, no memory files, an empty home."""
    for name in ("PATH", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "version", no_package)
    monkeypatch.setattr(nvml, "read_driver", Driver)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (512, 512))
    monkeypatch.setitem(sys.modules, "torch", None)  # its import fails

    def no_shm(path: str) -> None:
        raise FileNotFoundError(path)

    def no_files(name: str) -> int:
        raise PermissionError(1, "Operation not permitted", name)

    monkeypatch.setattr(doctor.os, "statvfs", no_shm)
    monkeypatch.setattr(doctor.os, "memfd_create", no_files)
    monkeypatch.setattr(device_build, "find_spec", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_a_machine_without_anything() -> None:
    found = findings()
    missing = {name for name, finding in found.items() if not finding.ok}
    assert missing == set(found) - {"python", "port 0", "remote transports", "gpu memory"}
    assert all(found[name].advice for name in missing)


def run(*words: str) -> int:
    """Runs the doctor, and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *words])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("bare")
def test_the_command_prints_a_line_each_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 1
    printed = capsys.readouterr()
    *lines, cpu, gpu = printed.out.splitlines()
    assert len(lines) == len(findings())
    assert {line.split()[0] for line in lines} == {"ok", "missing", "failed"}
    assert cpu == "CPU: nothing runs here; see torch, ray, grpcio, memory files, open files"
    assert printed.err == "tandem: failed: torch, ray, grpcio, memory files, open files\n"
    assert gpu.startswith("GPU: none; ")
    (nvcc,) = [line for line in lines if "nvcc" in line]
    assert nvcc.startswith("missing")
    assert "install the CUDA toolkit" in nvcc


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what GPUs this host has, and which checks lack something."""

    def set_up(*gpus: Gpu, lacking: tuple[str, ...] = ()) -> None:
        def found(port: int, driver: Driver) -> list[Finding]:
            names = (*doctor.NEEDED, *doctor.NEEDED_BY_GPUS, "nixl")
            return [Finding(name, "?", "install it" if name in lacking else "") for name in names]

        monkeypatch.setattr(nvml, "read_driver", lambda: Driver("580.1" if gpus else "", gpus))
        monkeypatch.setattr(doctor, "examine", found)

    return set_up


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code, and the JSON that is all of stdout."""
    code = run("--json", *words)
    return code, json.loads(capsys.readouterr().out)


def test_what_nothing_here_needs_does_not_fail(host: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    host(lacking=("triton", "nixl"))
    code, said = answered(capsys)
    assert (code, said["ok"], said["failed"]) == (0, True, [])
    assert {one["name"]: one["state"] for one in said["checks"]}["triton"] == "missing"
    host(H200, lacking=("triton", "nixl"))  # of no use without it
    assert answered(capsys)[1]["failed"] == ["triton", "gpus"]
    host(H200, lacking=("nixl",))
    assert answered(capsys)[0] == 0
    host(replace(H200, capability=(7, 0)))
    code, said = answered(capsys)
    assert (code, said["failed"], said["devices"][-1]["serves"]) == (1, ["gpus"], False)


def test_a_configuration_says_what_is_needed(
    host: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "model")
    model, config = str(tmp_path / "model"), tmp_path / "cluster.yaml"
    config.write_text("gateway: {port: 0}\n")
    host(H200, lacking=("triton", "nixl"))
    assert answered(capsys, str(config), "--model", model)[0] == 0
    code, said = answered(capsys, str(config))
    assert (code, said["failed"]) == (1, ["config"])
    (refused,) = [one for one in said["checks"] if one["state"] == "failed"]
    assert "model.path is null" in refused["found"]
    config.write_text("gateway: {port: 0}\nisland: {device: cuda, transport: nixl}\n")
    assert answered(capsys, str(config), "--model", model)[1]["failed"] == ["triton", "nixl", "config", "gpus"]
    config.write_text("gateway: {port: 1}\ngateways: {}\n")
    assert run(str(config)) == 2
    assert run(str(tmp_path / "none.yaml")) == 2
    assert run("--model", model) == 2
    assert "--model" in capsys.readouterr().err


def test_it_says_who_holds_the_memory_of_a_gpu(host: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    busy = replace(H200, used=70 << 30, holders=((os.getpid(), 69 << 30),), uuid="GPU-1")
    host(H200, busy)
    command = Path("/proc/self/comm").read_text().strip()
    code, said = answered(capsys)
    assert code == 0
    assert [one["used_bytes"] for one in said["gpus"]] == [0, 70 << 30]
    assert said["gpus"][1]["holders"] == [{"pid": os.getpid(), "command": command, "bytes": 69 << 30}]
    finding = doctor._gpu_memory(Driver("580.1", (H200, busy)))
    assert finding.found == f"GPU 1 has 70.0 GiB in use by process {os.getpid()} ({command}) 69.0 GiB"
    assert "CUDA_VISIBLE_DEVICES" in finding.advice
    assert doctor._gpu_memory(Driver("580.1", (H200,))).ok


def test_hosts_that_join_a_ray_need_no_gpus_here() -> None:
    config = load_config(None, {"island.device": "cuda", "island.transport": "nixl"})
    here, elsewhere = Needs.of_config(config, None), Needs.of_config(config, "10.0.0.1:6379")
    assert set(here.names) - set(elsewhere.names) == {*doctor.NEEDED_BY_GPUS, "nixl"}
    assert (here.any_gpu, elsewhere.any_gpu) == (True, False)


def test_a_gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "read_driver", lambda: Driver("580.1", (H200, H200), ((0, 1),)))
    monkeypatch.setattr(doctor, "_torch", gpus(2))
    found = findings()
    assert found["nvidia driver"] == Finding("nvidia driver", "580.1")
    assert found["gpus"].found == "2 × H200 of 139 GiB"
    assert found["peer to peer"] == Finding("peer to peer", "all 2 pairs (NVLink)")
    monkeypatch.setattr(doctor, "_torch", gpus(3, apart=(2, 0)))
    pairs = findings()["peer to peer"]
    assert (pairs.ok, pairs.found) == (False, "not 2→0")


def verdict_of(driver: Driver, *missing: str) -> list[str]:
    return [one.line for one in verdicts([Finding(name, "missing", "install it") for name in missing], driver)]


def test_each_device_gets_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = f"on {os.cpu_count()} cores"
    monkeypatch.setattr(rank_room.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    shapes = "each process on a core of its own while prefill_ranks and decode_ranks are 3 together"
    assert verdict_of(Driver()) == [
        f"CPU: deploy/local.yaml runs here, {cores}; {shapes}",
        "GPU: none; what a host with GPUs needs is in docs/gpu-hosts.md",
    ]
    monkeypatch.setattr(doctor, "_torch", gpus(4, apart=(2, 0)))
    busy, old = replace(H200, used=70 << 30), Gpu("V100", 32 << 30, (7, 0))
    _, *each = verdict_of(Driver("580.1", (H200, busy, H200, old)))
    assert each == [
        "GPU 0: H200, 139 GiB: deploy/gpu-1p1d.yaml runs here, also with prefill_ranks + decode_ranks of 1 + 2, 2 + 1",
        "GPU 1: H200, 139 GiB, 70.0 GiB in use by other processes: deploy/gpu-2p2d.yaml runs here, also with "
        "prefill_ranks + decode_ranks of 1 + 2, 2 + 1, 2 + 2 with less than 51.8 GiB of weights",
        "GPU 2: H200, 139 GiB: deploy/gpu-1p1d.yaml runs here, also with prefill_ranks + decode_ranks of 1 + 2, 2 + 1",
        "GPU 3: V100, 32 GiB: cannot serve; its compute capability is 7.0, 8.0 or later is needed",
    ]


def test_a_verdict_says_what_a_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_torch", gpus(1))
    alone = Driver("580.1", (replace(H200, capability=(10, 0)),))
    assert verdict_of(alone)[1].endswith("GiB: deploy/gpu-1.yaml runs here; tandem has run on Hopper only")
    cpu, gpu = verdict_of(alone, "triton", "/dev/shm")
    assert "runs here" in cpu
    assert gpu == "GPU 0: H200, 139 GiB: cannot serve; see triton"
    assert verdict_of(alone, "c compiler")[0].endswith("workers of one rank, for several need a C compiler")
    assert verdict_of(alone, "ray")[0] == "CPU: nothing runs here; see ray"


def test_packages_are_found_under_the_name_of_their_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("nvshmem4py-cu12", "torch"):
            return "1.2"
        return no_package(name)

    monkeypatch.setattr(doctor, "version", version)
    found = findings()
    assert [found[name].ok for name in ("nvshmem4py", "torch", "ray")] == [True, True, False]
    assert found["nvshmem4py"].found == "1.2"


@pytest.mark.parametrize(("driver", "ok"), [("580.159.04", True), ("570.1", True), ("565.77", False), ("?", False)])
def test_a_driver_may_be_too_old(monkeypatch: pytest.MonkeyPatch, driver: str, ok: bool) -> None:
    monkeypatch.setattr(nvml, "read_driver", lambda: Driver(driver))
    found = findings()["nvidia driver"]
    assert (found.ok, found.found) == (ok, driver)
    assert ok or "570 or later" in found.advice


@pytest.mark.parametrize(("release", "ok"), [("13.0, V13.0.48", True), ("12.4, V12.4.131", False)])
def test_nvcc_must_be_of_torchs_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, ok: bool) -> None:
    program(tmp_path / "nvcc", f"echo nvcc; echo 'Cuda compilation tools, release {release}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "_torch", gpus(2))
    found = findings()["nvcc"]
    assert found.ok == ok
    assert release in found.found
    assert ok or "torch is of CUDA 13.0" in found.found


def test_the_device_library_is_looked_for_where_its_package_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        device_build, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    assert not findings()["nvshmem library"].ok
    for file in (device_build.LIBRARY, device_build.HEADER):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    assert findings()["nvshmem library"] == Finding("nvshmem library", str(tmp_path))


def test_remote_transports_are_listed_and_called_untried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(device_build, "find_spec", lambda name: spec)
    rest = "untried: an island over nvshmem is one host"
    assert findings()["remote transports"] == Finding("remote transports", f"none; {rest}")
    libraries = ("nvshmem_transport_ibrc.so", "nvshmem_transport_ibrc.so.3", "nvshmem_transport_ucx.so.3", "other.so")
    for file in (device_build.LIBRARY, device_build.HEADER, *(f"lib/{name}" for name in libraries)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    found = findings()["remote transports"]
    assert found == Finding("remote transports", f"ibrc, ucx; {rest}")


def test_nixl_is_named_with_what_it_writes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "1.5.2")
    monkeypatch.setattr(doctor, "RDMA_CARDS", tmp_path)
    assert findings()["nixl"] == Finding("nixl", "1.5.2, over TCP alone: this host has no RDMA card")
    (tmp_path / "mlx5_0").mkdir()
    assert findings()["nixl"] == Finding("nixl", "1.5.2, over RDMA (mlx5_0) and TCP")
    monkeypatch.setattr(doctor, "version", no_package)
    assert "pip install 'tandem-serve[nixl]'" in findings()["nixl"].advice


def test_memory_files_may_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings()["memory files"].ok
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    found = findings()["memory files"]
    assert (found.ok, found.found) == (False, "up to 1.0 GiB")


def test_rays_token_must_be_there_and_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert "--generate" in findings()["ray token"].advice
    token.write_text("secret")
    token.chmod(0o644)
    found = findings()["ray token"]
    assert (found.ok, found.advice) == (False, f"others can read it: chmod 600 {token}")
    token.chmod(0o600)
    assert findings()["ray token"].ok
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    found = findings()["ray token"]
    assert found.ok
    assert "secret" not in found.found


def test_a_taken_port() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = findings(port)[f"port {port}"]
    assert not taken.ok
    assert "--grpc-port" in taken.advice


def test_a_tool_that_hangs_or_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "cc", "exec sleep 30")
    program(tmp_path / "nvcc", "exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "COMMAND_SECONDS", 0.2)
    found = findings()
    assert found["c compiler"].found.endswith("cc")
    assert found["nvcc"].found.endswith("nvcc")


def test_a_gpu_that_others_fill_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_torch", gpus(1))
    full = replace(H200, used=130 << 30, holders=((os.getpid(), 129 << 30),))
    (_, said) = verdict_of(Driver("580.1", (full,)))
    command = Path("/proc/self/comm").read_text().strip()
    assert said == (
        "GPU 0: H200, 139 GiB: cannot serve while it has 130.0 GiB in use by process "
        f"{os.getpid()} ({command}) 129.0 GiB; a worker needs 3.2 GiB beside weights and KV, of 0.9 of the memory"
    )


@pytest.mark.parametrize(("installed", "serves"), [("0.6.18", True), ("0.7.4", False), ("0.60.1", False)])
def test_a_flashinfer_that_does_not_serve_is_named(
    installed: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor names it, and so does whatever would load it."""
    monkeypatch.setattr(doctor, "version", lambda name: installed)
    monkeypatch.setattr(served_version, "version", lambda name: installed)
    reason = f"flashinfer-python is {installed}; it must be 0.6: pip install 'flashinfer-python==0.6.*'"
    found = findings()["flashinfer-python"]
    assert (found.found, found.advice) == (installed, "" if serves else reason)
    if not serves:
        with pytest.raises(RuntimeError, match=re.escape(reason)):
            load_flashinfer()
