"""Compiles native.c with the system's C compiler, once per machine and user, and loads it."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
# What -ffast-math has that sums in vectors need; NaN and infinity keep their meaning.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
FLAGS += ("-fno-signed-zeros", "-fassociative-math")
SECONDS_TO_COMPILE = 60

log = logging.getLogger(__name__)


@cache
def load_native() -> ctypes.CDLL | None:
    """build_native() in the user's cache folder, once in a process; None after one warning in the log."""
    try:
        return build_native(cache_folder())
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:  # RuntimeError: there is no home
        reason = getattr(error, "stderr", None) or error
        log.warning("native CPU kernels are not there, torch's serve instead: %s", str(reason).strip())
        return None


def build_native(folder: Path) -> ctypes.CDLL:
    """The library from `folder`, compiled unless it is there. Several processes may do so at once.

    Raises OSError without a compiler, or when the folder cannot be written or the library not be loaded;
    subprocess.SubprocessError when compiling fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler on PATH; one of {', '.join(COMPILERS)} is needed")
    try:
        # Where torch has loaded an OpenMP runtime, its symbols come first: one pool of threads serves both.
        return _load(compiler, (*FLAGS, "-fopenmp"), folder)
    except (OSError, subprocess.SubprocessError):
        return _load(compiler, FLAGS, folder)


def _load(compiler: str, flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    version = _run([compiler, "--version"])
    parts = (SOURCE.read_text(encoding="utf-8"), *flags, compiler, version, _processor())
    library = folder / f"native-{hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()}.so"
    if library.exists():
        return ctypes.CDLL(str(library))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = Path(own) / library.name
        _run([compiler, *flags, str(SOURCE), "-o", str(made)])
        loaded = ctypes.CDLL(str(made))
        made.replace(library)  # only what can be loaded
    return loaded


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
