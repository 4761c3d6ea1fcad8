"""Compiles a CUDA file of this folder with nvcc, once per machine, user, kind of GPU and options."""

from dataclasses import dataclass
from pathlib import Path
from shutil import which

from tandem.cache.kernels.build.build_once import (
    build_once,
    built_or_none,
    built_path,
    cache_folder,
    find_compiler,
    read_with_headers,
    run_compiler,
    short_hash,
)

FLAGS = ("-std=c++17", "-O3")


def defines(**values: int | str) -> tuple[str, ...]:
    """Options that set a kernel's constants. Commas in a text are escaped, for nvcc divides options at them."""
    texts = {
        name: value.replace(",", "\\,") if isinstance(value, str) else int(value) for name, value in values.items()
    }
    return tuple(f"-D{name}={text}" for name, text in texts.items())


@dataclass(frozen=True)
class Cubin:
    """The source and options from which one cubin is compiled.

    source: a file, which may include its folder's headers. defines: as `-DNAME=VALUE`. arch: as nvcc has it, `90` or
    `90a`.
    """

    source: Path
    defines: tuple[str, ...]
    arch: str

    @property
    def options(self) -> tuple[str, ...]:
        return (*FLAGS, *self.defines, f"-gencode=arch=compute_{self.arch},code=sm_{self.arch}")

    @property
    def key(self) -> bytes:
        """All inputs of the compilation except the compiler."""
        return repr((*read_with_headers(self.source, self.source.parent), *self.options)).encode()

    def name(self, compiler: str) -> str:
        """compiler: a hash of nvcc's version, or a pattern."""
        return f"{self.source.stem.replace('_', '-')}.{compiler}.cubin"


def load_cubin(cubin: Cubin, instead: str) -> bytes | None:
    """build_cubin() in the user's cache folder; None after a warning in the log, which says what happens instead."""
    return built_or_none(cubin.source.name, instead, lambda: build_cubin(cubin, cache_folder()).read_bytes())


def find_cubin(cubin: Cubin, folder: Path) -> Path | None:
    """The one in `folder` that build_cubin() would return without compiling."""
    version = _version()
    if version is not None:
        there = built_path(folder, cubin.name(version), cubin.key)
        return there if there.exists() else None
    pattern = built_path(folder, cubin.name("*"), cubin.key).name  # of whichever nvcc, the last one first
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def build_cubin(cubin: Cubin, folder: Path) -> Path:
    """The cubin in `folder`, compiled unless it is there. Several processes may do so at once.

    A host without nvcc takes what another host's has compiled. Raises OSError without nvcc or when the folder cannot be
    written, subprocess.SubprocessError when compiling fails.
    """
    there = find_cubin(cubin, folder)
    if there is not None:
        return there
    command = (find_compiler("nvcc"), *cubin.options, "-cubin", str(cubin.source), "-o")
    name = cubin.name(_version() or "")
    return build_once(folder, name, cubin.key, lambda made: run_compiler(*command, str(made)))


def _version() -> str | None:
    """A hash of what nvcc says of its version; None where there is no nvcc."""
    nvcc = which("nvcc")
    return None if nvcc is None else short_hash(run_compiler(nvcc, "--version").encode())[:8]
