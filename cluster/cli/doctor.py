"""Checks of what a host has for tandem, with advice on what it lacks. No check raises."""

import importlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from tandem.transfer.nvshmem.kernels.device_build import find_nvshmem

COMMAND_SECONDS = 20.0
SHM_BYTES = 8 << 30  # of /dev/shm: Ray's object store and NCCL's buffers
OLDEST_DRIVER = 570  # CUDA 12.8, whose driver takes copies in batches


@dataclass(frozen=True)
class Finding:
    """What a check found, and advice on what is missing. Empty advice: all is well."""

    name: str
    found: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice


def examine(port: int) -> Iterator[Finding]:
    """All findings, each as soon as it is known. port: the gateway's."""
    yield _python()
    for name in ("torch", "ray", "grpcio"):
        yield _package(name, "reinstall tandem: it is needed everywhere")
    yield _driver()
    yield _gpus()
    yield _peer_to_peer()
    for name in ("nvshmem4py", "flashinfer-python", "triton"):
        yield _package(name, "for a GPU island: pip install 'tandem[cuda13]', or [cuda12] for CUDA 12")
    yield _device_library()
    yield _nvcc()
    yield _tool("c compiler", ("cc", "gcc", "clang"), "for faster CPU kernels: install gcc")
    yield _shm()
    yield _memory_files()
    yield _ray_token()
    yield _port(port)


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding("python", platform.python_version(), "" if ok else "tandem needs Python 3.11 to 3.13")


def _package(name: str, advice: str) -> Finding:
    """nvshmem4py's distribution carries its CUDA version in its name."""
    for distribution in (name, f"{name}-cu13", f"{name}-cu12"):
        try:
            return Finding(name, version(distribution))
        except PackageNotFoundError:
            continue
    return Finding(name, "missing", advice)


def _driver() -> Finding:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    found = lines[0].strip() if lines else "missing"
    major = found.split(".")[0]
    if major.isdecimal() and int(major) >= OLDEST_DRIVER:
        return Finding("nvidia driver", found)
    return Finding("nvidia driver", found, f"for a GPU island: install the NVIDIA driver, {OLDEST_DRIVER} or later")


def _gpus() -> Finding:
    """As torch sees them: a driver alone does not help a CPU build of torch."""
    torch = _torch()
    if torch is None:
        return Finding("gpus", "not looked for without torch", "install torch")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if names:
        return Finding("gpus", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
    return Finding("gpus", f"none; {build}", "for a GPU island: a GPU, its driver and a CUDA build of torch")


def _peer_to_peer() -> Finding:
    """Whether every GPU can write into every other, and by what link where nvidia-smi knows."""
    torch = _torch()
    count = torch.cuda.device_count() if torch else 0
    if torch is None or count < 2:
        return Finding("peer to peer", f"{count} GPUs", "an island of GPUs needs two or more in one host")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [f"{i}→{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if apart:
        advice = "keep these GPUs out of one island: they would write by slower puts, not tried between such GPUs"
        return Finding("peer to peer", f"not {', '.join(apart)}", advice)
    return Finding("peer to peer", f"all {len(pairs)} pairs{_links()}")


def _torch() -> ModuleType | None:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _links() -> str:
    """How GPUs are linked, like ' (NV18)', from `nvidia-smi topo -m`; empty when it does not say."""
    rows = [line.split() for line in _output("nvidia-smi", "topo", "-m").splitlines() if line.startswith("GPU")]
    count = len(rows)
    links = sorted({link for row in rows for link in row[1 : count + 1]} - {"X"})
    return f" ({', '.join(links)})" if links else ""


def _device_library() -> Finding:
    """What device_puts.cu is linked with."""
    try:
        return Finding("nvshmem library", str(find_nvshmem()))
    except (FileNotFoundError, ImportError, ValueError):  # the last two: a parent package that is broken
        advice = "for GPUs that are not peer to peer: pip install nvidia-nvshmem-cu13, or -cu12 for CUDA 12"
        return Finding("nvshmem library", "missing", advice)


def _nvcc() -> Finding:
    """FlashInfer's kernels are loaded into a process that has torch's CUDA runtime."""
    advice = "for FlashInfer's kernels and device-side puts: install the CUDA toolkit of torch's CUDA version"
    finding = _tool("nvcc", ("nvcc",), advice)
    torch = _torch()
    wanted = torch.version.cuda if torch else None
    release = re.search(r"release (\d+)", finding.found)
    if wanted and release and release[1] != wanted.split(".")[0]:
        return Finding("nvcc", f"{finding.found}; torch is of CUDA {wanted}", advice)
    return finding


def _tool(name: str, commands: tuple[str, ...], advice: str) -> Finding:
    for command in commands:
        path = shutil.which(command)
        if path:
            lines = [line for line in _output(path, "--version").splitlines() if line.strip()]
            release = [line for line in lines if "release" in line] or lines[:1] or [path]
            return Finding(name, release[0].strip())
    return Finding(name, "missing", advice)


def _shm() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Finding("/dev/shm", "missing", "mount a tmpfs there")
    size = stat.f_frsize * stat.f_blocks
    text = f"{size / (1 << 30):.1f} GiB"
    if size >= SHM_BYTES:
        return Finding("/dev/shm", text)
    return Finding("/dev/shm", text, f"{SHM_BYTES >> 30} GiB suit Ray and NCCL: in a container, --shm-size")


def _memory_files() -> Finding:
    """An island of CPUs keeps its pages in memory files without a name, whatever the size of /dev/shm."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        descriptor = os.memfd_create("tandem-doctor")
        try:
            os.ftruncate(descriptor, 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding("memory files", f"refused ({error.strerror})", "for CPU islands: allow memfd_create")
    if limit != resource.RLIM_INFINITY:
        return Finding("memory files", f"up to {limit / (1 << 30):.1f} GiB", "pools may be larger: ulimit -f")
    return Finding("memory files", "of any size")


def _ray_token() -> Finding:
    """Whoever reaches a Ray without one runs code on it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Finding("ray token", "in RAY_AUTH_TOKEN")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path("~/.ray/auth_token").expanduser())
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        advice = "`tandem up` makes one; before `ray start`: ray get-auth-token --generate"
        return Finding("ray token", "missing", advice)
    if mode & 0o077:
        return Finding("ray token", f"{path} has mode {mode:o}", f"others can read it: chmod 600 {path}")
    return Finding("ray token", str(path))


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(f"port {port}", f"taken ({error.strerror})", "free it, or set gateway.port or --grpc-port")
    return Finding(f"port {port}", "free")


def _output(*command: str) -> str:
    """What a command prints; "" when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
