"""Compiles a CUDA file of this folder with nvcc, once per machine, user, kind of GPU and options."""

from collections.abc import Sequence
from pathlib import Path

from tandem.cache.kernels.build.build_once import (
    build_once,
    built_or_none,
    cache_folder,
    find_compiler,
    read_with_headers,
    run_compiler,
)

FLAGS = ("-std=c++17", "-O3")


def defines(**values: int | str) -> tuple[str, ...]:
    """Options that set a kernel's constants. Commas in a text are escaped, for nvcc divides options at them."""
    texts = {
        name: value.replace(",", "\\,") if isinstance(value, str) else int(value) for name, value in values.items()
    }
    return tuple(f"-D{name}={text}" for name, text in texts.items())


def load_cubin(source: Path, defines: Sequence[str], arch: str, instead: str) -> bytes | None:
    """build_cubin() in the user's cache folder; None after a warning in the log, which says what happens instead."""
    return built_or_none(source.name, instead, lambda: build_cubin(source, cache_folder(), defines, arch))


def build_cubin(source: Path, folder: Path, defines: Sequence[str], arch: str) -> bytes:
    """The cubin of one file, which may include its folder's headers, from `folder`; compiled unless it is there.
    Several processes may do so at once.

    defines: as `-DNAME=VALUE`. arch: as nvcc has it, `90` or `90a`. Raises OSError without nvcc or when the folder
    cannot be written, subprocess.SubprocessError when compiling fails.
    """
    nvcc = find_compiler("nvcc")
    options = (*FLAGS, *defines, f"-gencode=arch=compute_{arch},code=sm_{arch}")
    parts = (*read_with_headers(source, source.parent), *options, run_compiler(nvcc, "--version"))
    command = (nvcc, *options, "-cubin", str(source), "-o")
    name = f"{source.stem.replace('_', '-')}.cubin"
    return build_once(folder, name, repr(parts).encode(), lambda made: run_compiler(*command, str(made))).read_bytes()
