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
PAGE_FAULTS = 2 * (8 << 20) // 4096  # of both, in memory that the process has never touched


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told what it keeps")
def test_large_messages_use_memory_again() -> None:
    told = subprocess.run([sys.executable, "-c", ALLOCATIONS], capture_output=True, text=True, check=True, timeout=60)
    assert int(told.stdout) < PAGE_FAULTS // 10
