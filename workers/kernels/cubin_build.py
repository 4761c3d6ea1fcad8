"""Compiles a CUDA file of this folder with nvcc, once per machine, user, kind of GPU and options."""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from tandem.transfer.kernels.device_build import find_nvcc

FLAGS = ("-std=c++17", "-O3")
SECONDS_TO_COMPILE = 120.0


def build_cubin(source: Path, folder: Path, defines: tuple[str, ...], arch: str) -> bytes:
    """The cubin of one file, which may include its folder's headers, from `folder`; compiled unless it is there.
    Several processes may do so at once.

    defines: as `-DNAME=VALUE`. arch: as nvcc has it, `90` or `90a`. Raises TransportError without nvcc,
    subprocess.SubprocessError when compiling fails, OSError when the folder cannot be written.
    """
    nvcc = find_nvcc()
    options = (*FLAGS, *defines, f"-gencode=arch=compute_{arch},code=sm_{arch}")
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(source.parent.glob("*.cuh")))]
    parts = (*texts, *options, _run([nvcc, "--version"]))
    name = f"{source.stem.replace('_', '-')}-{hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()}.cubin"
    cubin = folder / name
    if not cubin.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / name
            _run([nvcc, *options, "-cubin", str(source), "-o", str(made)])
            made.replace(cubin)
    return cubin.read_bytes()


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE).stdout
