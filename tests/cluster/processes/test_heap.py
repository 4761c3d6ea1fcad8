"""Memory that is freed, and allocated again."""

import platform
import subprocess
import sys

import pytest

ALLOCATIONS = """
import resource
from tandem.cluster.processes.heap import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    message = bytes(bytearray(8 << 20))
    del message
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
THREADS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from tandem.cluster.processes.heap import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def work(_):
    barrier.wait()
    blocks = [bytes(1000) for _ in range(10_000)]
    kept = blocks[::500]
    barrier.wait()
    return kept

keep_freed_memory()
barrier = Barrier(8)
before = resident()
with ThreadPoolExecutor(8) as pool:
    kept = list(pool.map(work, range(8)))
    return_freed_memory()
    print(resident() - before)
"""
PAGE_FAULTS = 2 * (8 << 20) // 4096  # of both, in memory that the process has never touched


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told what it keeps")
def test_large_messages_use_memory_again() -> None:
    told = subprocess.run([sys.executable, "-c", ALLOCATIONS], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) < PAGE_FAULTS // 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told what it keeps")
def test_memory_that_threads_have_freed_is_given_back() -> None:
    told = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) < 40  # MiB, of the 80 that they had
