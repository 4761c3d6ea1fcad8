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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from tandem.cache.extras import install
from tandem.cache.kernels.build.nvml import VISIBLE, Driver, Gpu
from tandem.cache.kernels.flashinfer.served_version import refused_version
from tandem.cluster.cli.gpu_room import holders_of
from tandem.cluster.cli.preflight import FILES, fitting_config
from tandem.cluster.cli.rank_room import cpu_shapes, gpu_shapes
from tandem.transfer.nvshmem.kernels.device_build import find_nvshmem
from tandem.workers.runner.reserved_bytes import GPU_MEMORY_UTILIZATION, RESERVED_BYTES

COMMAND_SECONDS = 20.0
SHM_BYTES = 8 << 30  # of /dev/shm: Ray's object store and NCCL's buffers
REMOTE_TRANSPORT = "nvshmem_transport_"  # NVSHMEM's libraries for other hosts begin so
RDMA_CARDS = Path("/sys/class/infiniband")
GIB = 1 << 30
NEEDED = ("python", "torch", "ray", "grpcio", "memory files", "open files")
NEEDED_BY_GPUS = ("nvidia driver", "gpus", "nvshmem4py", "flashinfer-python", "triton")
OLDEST_GPU = (8, 0)
BUSY_BYTES = 1 << 30  # of a GPU's memory: a driver alone takes less
OLDEST_DRIVER = 570  # CUDA 12.8, whose driver takes copies in batches


@dataclass(frozen=True)
class Finding:
    """A check's finding, and advice on what is missing. Empty advice: all is well."""

    name: str
    found: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return not self.advice


@dataclass(frozen=True)
class Verdict:
    """A verdict on what can run on one device. serves: whether anything can."""

    device: str  # CPU, or GPU and its number
    said: str
    serves: bool

    @property
    def line(self) -> str:
        return f"{self.device}: {self.said}"


def examine(port: int, driver: Driver) -> Iterator[Finding]:
    """Yields all findings, each as soon as it is known. port: the gateway's."""
    yield _python()
    for name in ("torch", "ray", "grpcio"):
        yield _package(name, "reinstall tandem: it is needed everywhere")
    yield _driver(driver)
    yield _gpus(driver)
    yield _gpu_memory(driver)
    yield _peer_to_peer(driver)
    for name in ("nvshmem4py", "flashinfer-python", "triton"):
        found = _package(name, f"for a GPU island: {install('cuda13')}, or cuda12")
        yield replace(found, advice=refused_version()) if name == "flashinfer-python" and found.ok else found
    yield _device_library()
    yield _remote_transports()
    yield _nixl()
    yield _nvcc()
    yield _tool("c compiler", ("cc", "gcc", "clang"), "for faster CPU kernels: install gcc")
    yield _shm()
    yield _memory_files()
    yield _ray_token()
    yield _files()
    yield _port(port)


def verdicts(findings: Sequence[Finding], driver: Driver) -> Iterator[Verdict]:
    """Yields the CPU's verdict, then each GPU's, or one that says that there is none. findings: of examine()."""
    lacking = {finding.name for finding in findings if not finding.ok}
    for_all = [name for name in NEEDED if name in lacking]
    if for_all:
        yield Verdict("CPU", f"nothing runs here; see {', '.join(for_all)}", serves=False)
    else:
        shapes = cpu_shapes(compiler="c compiler" not in lacking)
        yield Verdict("CPU", f"{fitting_config(0)} runs here, on {os.cpu_count()} cores; {shapes}", serves=True)
    missing = [name for name in (*NEEDED, *NEEDED_BY_GPUS) if name in lacking]
    if not driver.gpus:
        yield Verdict("GPU", "none; what a host with GPUs needs is in docs/gpu-hosts.md", serves=False)
    for index, gpu in enumerate(driver.gpus):
        named = f"{gpu.name}, {gpu.memory / GIB:.0f} GiB"
        unfit = _unfit(gpu, missing)
        said = f": cannot serve{unfit}" if unfit else _runs(index, gpu, driver)
        yield Verdict(f"GPU {index}", named + said, serves=not unfit)


def _unfit(gpu: Gpu, missing: Sequence[str]) -> str:
    """Returns why the GPU cannot serve; empty if it can."""
    if missing:
        return f"; see {', '.join(missing)}"
    if gpu.capability < OLDEST_GPU:
        major, minor = gpu.capability
        return f"; its compute capability is {major}.{minor}, 8.0 or later is needed"
    if gpu.used > BUSY_BYTES and _room(gpu) <= 0:
        return (
            f" while it has {holders_of(gpu)}; a worker needs {RESERVED_BYTES / GIB:.1f} GiB beside weights and KV, of "
            f"{GPU_MEMORY_UTILIZATION:g} of the memory"
        )
    return ""


def _runs(index: int, gpu: Gpu, driver: Driver) -> str:
    others = [other for other in range(len(driver.gpus)) if other != index]
    peers = [other for other in others if _reaches(index, other) and _reaches(other, index)]
    busy, left = "", ""
    if gpu.used > BUSY_BYTES:
        busy, left = f", {holders_of(gpu)}", f" with less than {_room(gpu) / GIB:.1f} GiB of weights"
    tried = "" if gpu.capability == (9, 0) else "; tandem has run on Hopper only"
    shapes = gpu_shapes(len(peers) + 1)
    ranks = f", also with prefill_ranks + decode_ranks of {', '.join(shapes)}" if shapes else ""
    return f"{busy}: {fitting_config(len(peers) + 1)} runs here{ranks}{left}{tried}"


def _room(gpu: Gpu) -> int:
    """Returns the bytes for weights and KV that other processes leave."""
    return int(gpu.memory * GPU_MEMORY_UTILIZATION) - RESERVED_BYTES - gpu.used


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding("python", platform.python_version(), "" if ok else "tandem needs Python 3.11 to 3.13")


def _package(name: str, advice: str) -> Finding:
    """Finds a package. nvshmem4py's distribution carries its CUDA version in its name."""
    for distribution in (name, f"{name}-cu13", f"{name}-cu12"):
        try:
            return Finding(name, version(distribution))
        except PackageNotFoundError:
            continue
    return Finding(name, "missing", advice)


def _driver(driver: Driver) -> Finding:
    found = driver.version or "missing"
    major = found.split(".")[0]
    if major.isdecimal() and int(major) >= OLDEST_DRIVER:
        return Finding("nvidia driver", found)
    return Finding("nvidia driver", found, f"for a GPU island: install the NVIDIA driver, {OLDEST_DRIVER} or later")


def _gpus(driver: Driver) -> Finding:
    """Finds the driver's GPUs. A CPU build of torch cannot use them."""
    torch = _torch()
    if torch is None:
        return Finding("gpus", "of no use without torch", "install torch")
    names = [f"{gpu.name} of {gpu.memory / GIB:.0f} GiB" for gpu in driver.gpus]
    found = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "none"
    if names and torch.version.cuda:
        return Finding("gpus", found)
    build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
    return Finding("gpus", f"{found}; {build}", "for a GPU island: a GPU, its driver and a CUDA build of torch")


def _gpu_memory(driver: Driver) -> Finding:
    """Finds GPU memory that other processes hold. A driver alone takes less than BUSY_BYTES."""
    if not driver.gpus:
        return Finding("gpu memory", "no GPU")
    busy = [f"GPU {number} has {holders_of(gpu)}" for number, gpu in enumerate(driver.gpus) if gpu.used > BUSY_BYTES]
    if busy:
        advice = f"end those processes, or name other GPUs in {VISIBLE}"
        return Finding("gpu memory", "; ".join(busy), advice)
    most = max(gpu.used for gpu in driver.gpus)
    return Finding("gpu memory", f"free; at most {most / GIB:.1f} GiB of a GPU in use")


def _peer_to_peer(driver: Driver) -> Finding:
    """Returns whether every GPU can write into every other, and by what link."""
    torch = _torch()
    count = torch.cuda.device_count() if torch else 0
    if count == 1:
        return Finding("peer to peer", "1 GPU: an island of one worker")
    if count == 0:
        return Finding("peer to peer", "no GPU", "what a host with GPUs needs is in docs/gpu-hosts.md")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [f"{i}→{j}" for i, j in pairs if not _reaches(i, j)]
    if apart:
        advice = "keep these GPUs out of one island: they would write by slower puts, not tried between such GPUs"
        return Finding("peer to peer", f"not {', '.join(apart)}", advice)
    link = "NVLink" if 2 * len(driver.links) >= len(pairs) else "PCIe, some of them"
    return Finding("peer to peer", f"all {len(pairs)} pairs ({link})")


def _reaches(one: int, other: int) -> bool:
    torch = _torch()
    if torch is None or max(one, other) >= torch.cuda.device_count():
        return False
    return torch.cuda.can_device_access_peer(one, other)


def _torch() -> ModuleType | None:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _device_library() -> Finding:
    """Finds NVSHMEM, with which device_puts.cu is linked."""
    try:
        return Finding("nvshmem library", str(find_nvshmem()))
    except (FileNotFoundError, ImportError, ValueError):  # the last two: a parent package that is broken
        advice = "for GPUs that are not peer to peer: pip install nvidia-nvshmem-cu13, or -cu12 for CUDA 12"
        return Finding("nvshmem library", "missing", advice)


def _remote_transports() -> Finding:
    """Finds the libraries by which NVSHMEM could write to GPUs of other hosts. An island over NVSHMEM spans no hosts,
    so nothing is missing here."""
    try:
        libraries = sorted((find_nvshmem() / "lib").glob(f"{REMOTE_TRANSPORT}*.so*"))
    except (FileNotFoundError, ImportError, ValueError):
        libraries = []
    names = dict.fromkeys(library.name.removeprefix(REMOTE_TRANSPORT).partition(".")[0] for library in libraries)
    found = f"{', '.join(names) or 'none'}; untried: an island over nvshmem is one host"
    return Finding("remote transports", found)


def _nixl() -> Finding:
    """Finds NIXL, by which workers on several hosts write into each other's GPUs, and what it writes over."""
    try:
        found = version("nixl")
    except PackageNotFoundError:
        return Finding("nixl", "missing", f"for GPU workers on several hosts, island.transport nixl: {install('nixl')}")
    cards = sorted(card.name for card in RDMA_CARDS.glob("*"))
    links = f"RDMA ({', '.join(cards)}) and TCP" if cards else "TCP alone: this host has no RDMA card"
    return Finding("nixl", f"{found}, over {links}")


def _nvcc() -> Finding:
    """Finds nvcc. FlashInfer's kernels are loaded into a process that has torch's CUDA runtime."""
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
    """Checks memory files without a name: an island of CPUs keeps its pages there, whatever the size of /dev/shm."""
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
    """Checks Ray's token: without one, anybody who reaches a Ray can run code on it."""
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


def _files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FILES:
        return Finding("open files", "without a limit" if hard == resource.RLIM_INFINITY else f"up to {hard}")
    return Finding("open files", f"up to {hard}", f"at least {FILES} are needed: ulimit -n, or LimitNOFILE= of systemd")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(f"port {port}", f"taken ({error.strerror})", "free it, or set gateway.port or --grpc-port")
    return Finding(f"port {port}", "free")


def _output(*command: str) -> str:
    """Returns what a command prints; "" if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
