"""Compiles a CUDA file of this folder with nvcc, once per machine, user, kind of GPU and options."""

import subprocess
from pathlib import Path

from tandem.cache.kernels.build_once import build_once
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
    name, command = f"{source.stem.replace('_', '-')}.cubin", [nvcc, *options, "-cubin", str(source), "-o"]
    return build_once(folder, name, repr(parts).encode(), lambda made: _run([*command, str(made)])).read_bytes()


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE).stdout
