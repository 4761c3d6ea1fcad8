"""Compiles device_puts.cu with nvcc against NVSHMEM's device library, once per machine, user and kind of GPU."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tandem.cache.kernels.build.build_once import build_once, built_path, find_compiler, reason_of, run_compiler
from tandem.transfer.errors import TransportError

SOURCE = Path(__file__).with_name("device_puts.cu")
LIBRARY = Path("lib", "libnvshmem_device.a")
HEADER = Path("include", "nvshmem.h")
NAME = "device-puts.cubin"
FLAGS = ("-std=c++17", "-O3", "-rdc=true")


def build_device_puts(folder: Path, capability: tuple[int, int]) -> Path:
    """The cubin in `folder`, compiled unless it is there. Several processes may do so at once.

    capability: of the GPU, as torch gives it. TransportError without nvcc, without NVSHMEM's device library, or with
    what nvcc said when it fails.
    """
    try:
        return _build(folder, "".join(map(str, capability)))
    except (OSError, subprocess.SubprocessError) as error:
        raise TransportError(
            f"{SOURCE.name} cannot be compiled: {reason_of(error)}; PEs that are not peer to peer need it, and "
            "`tandem doctor` says what this host lacks"
        ) from error


def has_device_puts(folder: Path, capability: tuple[int, int]) -> bool:
    """Whether build_device_puts() would compile nothing; False without nvcc. Raises what find_nvshmem() raises."""
    home = find_nvshmem()
    if shutil.which("nvcc") is None:
        return False
    return built_path(folder, NAME, _key(home, _target("".join(map(str, capability))))).exists()


def _build(folder: Path, arch: str) -> Path:
    nvcc, home, target = find_compiler("nvcc"), find_nvshmem(), _target(arch)

    def make(linked: Path) -> None:
        compiled = str(linked.with_suffix(".o"))
        run_compiler(nvcc, *FLAGS, target, f"-I{home / HEADER.parent}", "-dc", str(SOURCE), "-o", compiled)
        libraries = (f"-L{home / LIBRARY.parent}", "-lnvshmem_device")
        run_compiler(nvcc, target, "-dlink", "-cubin", compiled, *libraries, "-o", str(linked))

    return build_once(folder, NAME, _key(home, target), make)


def _target(arch: str) -> str:
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def _key(home: Path, target: str) -> bytes:
    version = run_compiler(find_compiler("nvcc"), "--version")
    parts = (SOURCE.read_bytes(), (home / LIBRARY).read_bytes(), repr((FLAGS, target, version)).encode())
    return b"/".join(parts)


def find_nvshmem() -> Path:
    """The folder with NVSHMEM's include and lib, which torch's CUDA builds bring along. FileNotFoundError without."""
    spec = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    for home in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        if (home / LIBRARY).exists() and (home / HEADER).exists():
            return home
    raise FileNotFoundError(f"{LIBRARY} and {HEADER} of the package nvidia-nvshmem are not installed")
