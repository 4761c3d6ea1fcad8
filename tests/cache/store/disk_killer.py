"""Kills a process that writes pages to a disk, over and over, and reads what each has left. Prints JSON."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

import numpy as np

from tandem.cache.store.disk.disk_pages import DiskPages, DiskSpace, Reading

PAGE_BYTES = (1 << 16, 12_000)  # the second one is no whole number of blocks
NAMES = 64  # of which the disk holds about a third
KILLS = 12


def space(folder: Path) -> DiskSpace:
    return DiskSpace(folder, tuple(22 * (size + 4096) for size in PAGE_BYTES), b"fingerprint of 1")


def content(group: int, name: int) -> np.ndarray:
    return np.random.default_rng(100 * group + name).integers(0, 256, PAGE_BYTES[group], np.uint8)


def write(folder: Path, seed: int) -> None:
    """Writes until it is killed."""
    random, disk = Random(seed), DiskPages(PAGE_BYTES, space(folder))
    pages = [[content(group, name) for name in range(NAMES)] for group in range(2)]
    for number in count():
        group, name = random.randrange(2), random.randrange(NAMES)
        disk.put(group, bytes([name]), pages[group][name], lambda: True)
        if number % 8 == 0:
            disk.settle(1)


def look(folder: Path) -> dict[str, int]:
    """Reads all that is there. wrong: pages that are not what their names say."""
    disk, wrong, found = DiskPages(PAGE_BYTES, space(folder)), 0, 0
    assert disk.settle(30)
    for group in range(2):
        names = sorted({name[0] for name in disk.digests()})
        targets = [np.empty(PAGE_BYTES[group], np.uint8) for _ in names]
        reading = Reading(group, [bytes([name]) for name in names], targets)
        disk.read([reading])
        assert reading.done.wait(30)
        found += int(reading.found.sum())
        good = [np.array_equal(target, content(group, name)) for target, name in zip(targets, names, strict=True)]
        wrong += sum(there and not right for there, right in zip(reading.found.tolist(), good, strict=True))
    counts = disk.counts
    disk.close()
    return {"found": found, "wrong": wrong, "bad": counts.bad, "adopted": counts.adopted, "used": counts.used,
            "capacity": counts.capacity}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    folder, random = Path(arguments[0]), Random(int(arguments[1]))
    for number in range(KILLS):
        writer = os.fork()
        if not writer:
            try:
                write(folder, number)
            finally:
                os._exit(1)
        time.sleep(0.03 + 0.15 * random.random())
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        print(json.dumps(look(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
