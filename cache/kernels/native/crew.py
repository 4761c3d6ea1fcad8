"""The threads that native kernels of this process share; see crew.c."""

import ctypes
from functools import cache
from pathlib import Path

from tandem.cache.kernels.build.native_build import load_library

SOURCE = Path(__file__).with_name("crew.c")


class Crew:
    """One in a process. A kernel that finds it at work for another thread's kernel runs on its caller alone."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.new_crew.restype = ctypes.c_void_p
        address = library.new_crew()
        if not address:
            raise MemoryError("no memory for the threads of native kernels")
        self.address = int(address)
        self._set_threads = library.set_crew_threads
        self._set_threads.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        self._threads = 1

    @property
    def threads(self) -> int:
        """How many may work on one kernel, its caller included; at first 1."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        """Sets the number of threads, at least 1, or fewer where the system has no more. They start at once and sleep
        while idle."""
        if threads != self._threads:
            self._threads = int(self._set_threads(self.address, threads))


@cache
def load_crew() -> Crew | None:
    """This process's crew; None where native kernels cannot be built."""
    library = load_library(SOURCE)
    return None if library is None else Crew(library)
