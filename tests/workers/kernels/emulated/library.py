"""Kernels of a GPU as libraries for this machine's CPU."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
DEVICE_HEADER = Path(__file__).with_name("device.h")
# Many CPUs convert float16 by one instruction, which the compiler must be allowed to use. Products and sums stay apart.
OPTIONS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-w", "-shared", "-fPIC")


def library_builder(source: Path, folder: Path) -> Callable[[tuple[str, ...]], ctypes.CDLL]:
    """Returns a function that compiles `source` into `folder`, and loads it, once for each tuple of compiler
    options."""

    @cache
    def build(options: tuple[str, ...]) -> ctypes.CDLL:
        library = folder / f"{source.stem}-{build.cache_info().misses}.so"
        header = f'-DEMULATED_DEVICE="{DEVICE_HEADER}"'
        subprocess.run(
            [str(COMPILER), *OPTIONS, *options, header, str(source), "-o", str(library)], check=True, timeout=120
        )
        return ctypes.CDLL(str(library))

    return build
