"""Compiles C sources with the system's compiler, once per machine and user, and loads them."""

import ctypes
import platform
import subprocess
from functools import cache
from pathlib import Path

from tandem.cache.kernels.build.build_once import (
    build_once,
    built_or_none,
    built_path,
    cache_folder,
    find_compiler,
    read_with_headers,
    run_compiler,
)

HEADERS = Path(__file__).parents[1] / "native"
COMPILERS = ("cc", "gcc", "clang")
# What -ffast-math has that sums in vectors need; NaN and infinity keep their meaning.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
FLAGS += ("-fno-signed-zeros", "-fassociative-math", "-pthread")


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """build_library() in the user's cache folder, once in a process; None after one warning in the log."""
    return built_or_none(source.name, "Python serves instead", lambda: build_library(source, cache_folder()))


@cache
def load_short_calls(source: Path) -> ctypes.PyDLL | None:
    """load_library(), whose calls of a few µs keep the interpreter lock: a call that released it could wait 5 ms
    for a busy thread."""
    library = load_library(source)
    return None if library is None else ctypes.PyDLL(library._name)


def find_library(source: Path, folder: Path) -> Path | None:
    """The file in `folder` that build_library() would load without compiling; None also without a compiler."""
    try:
        there = built_path(folder, f"{source.stem}.so", _key(source, find_compiler(*COMPILERS)))
    except (OSError, subprocess.SubprocessError):
        return None
    return there if there.exists() else None


def build_library(source: Path, folder: Path) -> ctypes.CDLL:
    """The library of one C file, which may include the headers of kernels/native, from `folder`; compiled unless it is there.

    Several processes may do so at once. Raises OSError without a compiler, or when the folder cannot be written or the
    library not be loaded; subprocess.SubprocessError when compiling fails.
    """
    compiler = find_compiler(*COMPILERS)

    def make(library: Path) -> None:
        run_compiler(compiler, *FLAGS, "-I", str(HEADERS), str(source), "-o", str(library))
        ctypes.CDLL(str(library))  # only what can be loaded is kept

    return ctypes.CDLL(str(build_once(folder, f"{source.stem}.so", _key(source, compiler), make)))


def _key(source: Path, compiler: str) -> bytes:
    parts = (*read_with_headers(source, HEADERS), *FLAGS, compiler, run_compiler(compiler, "--version"), _processor())
    return repr(parts).encode()


def _processor() -> str:
    """Returns the facts on which -march=native depends. Machines that share a home folder may differ in them."""
    keys = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
