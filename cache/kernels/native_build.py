"""Compiles C sources with the system's compiler, once per machine and user, and loads them."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tandem.cache.kernels.build_once import build_once

HEADERS = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# What -ffast-math has that sums in vectors need; NaN and infinity keep their meaning.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
FLAGS += ("-fno-signed-zeros", "-fassociative-math", "-pthread")
SECONDS_TO_COMPILE = 60

log = logging.getLogger(__name__)


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """build_library() in the user's cache folder, once in a process; None after one warning in the log."""
    try:
        return build_library(source, cache_folder())
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = getattr(error, "stderr", None) or error
        log.warning("%s is not there, torch serves instead: %s", source.name, str(reason).strip())
        return None


def build_library(source: Path, folder: Path) -> ctypes.CDLL:
    """The library of one C file, which may include this folder's headers, from `folder`; compiled unless it is there.

    Several processes may do so at once. Raises OSError without a compiler, or when the folder cannot be written or the
    library not be loaded; subprocess.SubprocessError when compiling fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler on PATH; one of {', '.join(COMPILERS)} is needed")
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]
    parts = (*texts, *FLAGS, compiler, _run([compiler, "--version"]), _processor())

    def make(library: Path) -> None:
        _run([compiler, *FLAGS, "-I", str(HEADERS), str(source), "-o", str(library)])
        ctypes.CDLL(str(library))  # only what can be loaded is kept

    return ctypes.CDLL(str(build_once(folder, f"{source.stem}.so", repr(parts).encode(), make)))


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS_TO_COMPILE).stdout


def _processor() -> str:
    """What -march=native goes by: machines that share a home folder may differ."""
    keys = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def cache_folder() -> Path:
    """Where this user keeps what was compiled here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"
