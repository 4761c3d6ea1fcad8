"""Finds names that are left in /dev/shm, where other processes come and go meanwhile."""

import os
import time

LOOK_AGAIN_SECONDS = 0.05


def lasting_names() -> set[str]:
    """The names that are there at both of two looks: what another process makes and unlinks at once, as Ray and
    multiprocessing do, is none of them."""
    first = set(os.listdir("/dev/shm"))
    time.sleep(LOOK_AGAIN_SECONDS)
    return first & set(os.listdir("/dev/shm"))
