"""Finds names that are left in /dev/shm, where other processes come and go meanwhile."""

import os
import time

LOOK_AGAIN_SECONDS = 0.05


def lasting_names() -> set[str]:
    """Returns the names that are there at both of two looks. Names that other processes make and unlink at once, as Ray
    and multiprocessing do, are left out."""
    first = set(os.listdir("/dev/shm"))
    time.sleep(LOOK_AGAIN_SECONDS)
    return first & set(os.listdir("/dev/shm"))
