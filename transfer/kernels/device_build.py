"""Compiles device_puts.cu with nvcc against NVSHMEM's device library, once per machine, user and kind of GPU."""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tandem.cache.kernels.build_once import build_once
from tandem.transfer.errors import TransportError

SOURCE = Path(__file__).with_name("device_puts.cu")
LIBRARY = Path("lib", "libnvshmem_device.a")
HEADER = Path("include", "nvshmem.h")
FLAGS = ("-std=c++17", "-O3", "-rdc=true")
SECONDS_TO_COMPILE = 120.0
ADVICE = "PEs that are not peer to peer need it; `tandem doctor` says what this host lacks"


def build_device_puts(folder: Path, capability: tuple[int, int]) -> Path:
    """The cubin in `folder`, compiled unless it is there. Several processes may do so at once.

    capability: of the GPU, as torch gives it. TransportError without nvcc, without NVSHMEM's device library, or with
    what nvcc said when it fails.
    """
    nvcc, home = find_nvcc(), find_nvshmem()
    arch = "".join(map(str, capability))
    target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    version = _run([nvcc, "--version"])
    parts = (SOURCE.read_bytes(), (home / LIBRARY).read_bytes(), repr((FLAGS, target, version)).encode())

    def make(linked: Path) -> None:
        compiled = linked.with_suffix(".o")
        _run([nvcc, *FLAGS, target, f"-I{home / HEADER.parent}", "-dc", str(SOURCE), "-o", str(compiled)])
        libraries = [f"-L{home / LIBRARY.parent}", "-lnvshmem_device"]
        _run([nvcc, target, "-dlink", "-cubin", str(compiled), *libraries, "-o", str(linked)])

    return build_once(folder, "device-puts.cubin", b"/".join(parts), make)


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise TransportError(f"nvcc is not on the PATH; {ADVICE}")
    return nvcc


def find_nvshmem() -> Path:
    """The folder with NVSHMEM's include and lib, which torch's CUDA builds bring along."""
    spec = find_spec("nvidia.nvshmem") if find_spec("nvidia") else None
    for home in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        if (home / LIBRARY).exists() and (home / HEADER).exists():
            return home
    raise TransportError(f"{LIBRARY} and {HEADER} of the package nvidia-nvshmem are not installed; {ADVICE}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransportError(f"{command[0]} cannot be used: {error}; {ADVICE}") from error
    if done.returncode:
        raise TransportError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
