"""Triton made ready before a fork: at a process's first launch it hashes all of itself, which takes half a second.

Measured with triton 3.6, which keeps the hash; a device is not touched.
"""

from triton.runtime.cache import triton_key


def preload_triton() -> None:
    triton_key()
