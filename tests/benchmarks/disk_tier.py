"""Pages on a disk, against the disk itself and against memory; JSON.

python -m tests.benchmarks.disk_tier --folder /nvme/kv

write, read    bytes a second through DiskPages, checksums included. to_file: ÷ direct writes and reads of a file in the
    same folder, in the same run, in pieces of a page.
checksums      bytes a second on one core: of a page's sum, and of what could be in its place.
"""

import mmap
import os
import time
import zlib
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tandem.cache.store.disk.disk_pages import DiskPages, DiskSpace, Reading
from tandem.cache.store.disk.entries import Entry, PageSum, words_of
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.results import print_result

SECONDS = 600.0
ROUNDS = 20


def rate(num_bytes: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began)


def file_rates(folder: Path, page: np.ndarray, count: int) -> tuple[float, float]:
    """Returns the rates of direct writes and of reads."""
    file = os.open(folder / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(file, 0, count * page.size)
        write = rate(count * page.size, lambda: [os.pwrite(file, page.data, at * page.size) for at in range(count)])
        return write, rate(
            count * page.size, lambda: [os.preadv(file, [page.data], at * page.size) for at in range(count)]
        )
    finally:
        os.close(file)
        (folder / "file").unlink()


def disk_rates(folder: Path, page: np.ndarray, count: int) -> tuple[float, float]:
    disk = DiskPages([page.size], DiskSpace(folder / "pages", [count * (page.size + 8192) + (1 << 20)], bytes(16)))
    try:
        disk.settle(SECONDS)
        names = [number.to_bytes(8, "little") for number in range(count)]

        def write() -> None:
            for name in names:
                disk.put(0, name, page, lambda: True)
            assert disk.settle(SECONDS)

        def read() -> None:
            reading = Reading(0, names, [page] * count)
            disk.read([reading])
            assert reading.done.wait(SECONDS)
            assert reading.found.all()

        return rate(count * page.size, write), rate(count * page.size, read)
    finally:
        disk.close()


def checksum_rates(page: np.ndarray) -> dict[str, float]:
    total, words = PageSum(page.size), words_of(page)
    entry = Entry(bytes(16), 0, b"", page.size, 0, 0)
    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: total.of(words, entry),
        "crc32": lambda: zlib.crc32(page.data),
        "blake2b": lambda: blake2b(page.data, digest_size=16),
    }
    return {
        name: rate(ROUNDS * page.size, lambda way=way: [way() for _ in range(ROUNDS)]) for name, way in ways.items()
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--folder", type=Path, help="on the disk; default: a new one for temporary files")
    parser.add_argument("--page-bytes", type=int, default=2 << 20, help="a multiple of 4096")
    parser.add_argument("--pages", type=int, default=256)
    options = parser.parse_args()
    page = np.frombuffer(mmap.mmap(-1, options.page_bytes), np.uint8)
    page[:] = np.random.default_rng(1).integers(0, 256, page.size, np.uint8)
    with TemporaryDirectory(dir=options.folder) as folder:
        of_file, of_disk = (of(Path(folder), page, options.pages) for of in (file_rates, disk_rates))
    found = {
        name: {"bytes_per_second": round(own), "to_file": round(own / other, 3)}
        for name, own, other in zip(("write", "read"), of_disk, of_file, strict=True)
    }
    sums = {name: round(value) for name, value in checksum_rates(page).items()}
    print_result({"page_bytes": page.size, "pages": options.pages, **found, "checksums": sums}, options)


if __name__ == "__main__":
    main()
