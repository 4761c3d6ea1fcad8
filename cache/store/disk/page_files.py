"""The files of one layer group's pages: of fixed size, each with a table of headers before its pages.

│ header of slot 0, 1, … │ page of slot 0 │ page of slot 1 │ …
0                        a block                             the end of the file
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.cache.store.disk.entries import HEADER_BYTES, Entry

BLOCK = 4096  # direct reads and writes begin and end at multiples of it
FILE_BYTES = 1 << 30
MOST_OPEN = 32  # files of a group
MOST_READS = 4  # of a group at once
Bytes = NDArray[np.uint8]


class OpenFile(NamedTuple):
    """direct: for pages. headers: for the table. is_direct: whether the first one passes the page cache by."""

    direct: int
    headers: int
    is_direct: bool


@dataclass(frozen=True)
class FileShape:
    """page_bytes: of a page. each: slots of a file. count: files."""

    page_bytes: int
    each: int
    count: int

    @classmethod
    def within(cls, page_bytes: int, num_bytes: int) -> "FileShape":
        """Uses as many files of FILE_BYTES as num_bytes hold; else one smaller file, which may have no slot. So a
        larger bound leaves the files that are there."""
        whole = cls(page_bytes, max(cls._slots(page_bytes, FILE_BYTES), 1), 1)
        count = num_bytes // whole.file_bytes
        return replace(whole, count=count) if count else cls(page_bytes, cls._slots(page_bytes, num_bytes), 1)

    @staticmethod
    def least_bytes(page_bytes: int) -> int:
        """The fewest num_bytes that hold a page."""
        return in_blocks(page_bytes) + HEADER_BYTES + BLOCK - 1

    @staticmethod
    def _slots(page_bytes: int, num_bytes: int) -> int:
        return max(num_bytes - BLOCK + 1, 0) // (in_blocks(page_bytes) + HEADER_BYTES)

    @property
    def table_bytes(self) -> int:
        return in_blocks(self.each * HEADER_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.table_bytes + self.each * in_blocks(self.page_bytes)

    @property
    def num_slots(self) -> int:
        return self.each * self.count

    @property
    def num_bytes(self) -> int:
        return self.file_bytes * self.count if self.each else 0


class PageFiles:
    """Owned by one thread. A header is written after its page, and cleared before the page is written again. So a
    killed process leaves whole entries or none. Errors are OSErrors."""

    def __init__(self, folder: Path, group: int, shape: FileShape) -> None:
        self._folder, self._group, self.shape = folder, group, shape
        self._open: OrderedDict[int, OpenFile] = OrderedDict()  # the last one used comes last
        self._stride = in_blocks(shape.page_bytes)
        self._rooms = [np.frombuffer(mmap.mmap(-1, max(self._stride, BLOCK)), np.uint8) for _ in range(MOST_READS)]
        self._room = self._rooms[0]  # each begins a block

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """Yields the slots that have a header. Removes files of other shapes or names."""
        shape = self.shape
        for path in sorted(self._folder.glob(f"group{self._group}-*.pages")):
            number = path.stem.rpartition("-")[2]
            known = number.isdecimal() and path == self._path(int(number)) and int(number) < shape.count
            if not known or not shape.each or path.stat().st_size != shape.file_bytes:
                path.unlink()
                continue
            table = os.pread(self._file(int(number)).headers, shape.each * HEADER_BYTES, 0)
            for index in range(len(table) // HEADER_BYTES):
                header = table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
                if (entry := Entry.unpack(header)) is not None:
                    yield int(number) * shape.each + index, entry

    def stage(self, page: Bytes) -> Bytes:
        """A copy of a page, uint8 [page_bytes], which write() takes. The next call of this or of a reader overwrites
        it."""
        self._room[page.size :] = 0
        self._room[: page.size] = page
        return self._room[: page.size]

    def write(self, slot: int, entry: Entry) -> None:
        """Writes the page that stage() has copied."""
        file, header, begin = self._places(slot)
        os.pwrite(file.headers, bytes(HEADER_BYTES), header)
        self._all(os.pwrite(file.direct, self._room[: self._stride].data, begin))
        os.pwrite(file.headers, entry.pack(), header)
        if not file.is_direct:
            os.posix_fadvise(file.direct, begin, self._stride, os.POSIX_FADV_DONTNEED)

    def reader(self, slot: int, page: Bytes, number: int) -> Callable[[], None]:
        """Returns a function that fills page, uint8 [page_bytes], from a slot. Another thread may call it, while this
        thread makes no calls but for the other readers that run at once. number: the reader's, below MOST_READS."""
        file, _, begin = self._places(slot)
        return partial(self._read, file, begin, page, self._rooms[number])

    def _read(self, file: OpenFile, begin: int, page: Bytes, room: Bytes) -> None:
        straight = not file.is_direct or (page.ctypes.data % BLOCK == 0 and page.size % BLOCK == 0)
        if straight:
            self._all(os.preadv(file.direct, [page.data], begin), page.size)
        else:
            self._all(os.preadv(file.direct, [room[: self._stride].data], begin))
            page[:] = room[: page.size]
        if not file.is_direct:
            os.posix_fadvise(file.direct, begin, self._stride, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Idempotent."""
        while self._open:
            _close(self._open.popitem()[1])

    def _all(self, count: int, wanted: int | None = None) -> None:
        wanted = self._stride if wanted is None else wanted
        if count != wanted:
            raise OSError(f"{count} of {wanted} bytes of a page were moved")

    def _places(self, slot: int) -> tuple[OpenFile, int, int]:
        """Returns a slot's file, and the bytes at which its header and its page begin there."""
        number, index = divmod(slot, self.shape.each)
        return self._file(number), index * HEADER_BYTES, self.shape.table_bytes + index * self._stride

    def _path(self, number: int) -> Path:
        return self._folder / f"group{self._group}-{number}.pages"

    def _file(self, number: int) -> OpenFile:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= MOST_OPEN:
            _close(self._open.popitem(last=False)[1])
        file = self._open[number] = self._opened(self._path(number))
        return file

    def _opened(self, path: Path) -> OpenFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        headers = os.open(path, flags, 0o600)
        try:
            if os.fstat(headers).st_size != self.shape.file_bytes:
                self._allocate(headers, path)
            try:
                return OpenFile(os.open(path, flags | os.O_DIRECT), headers, is_direct=True)
            except OSError:  # the file system has no direct access
                return OpenFile(os.open(path, flags), headers, is_direct=False)
        except BaseException:
            os.close(headers)
            raise

    def _allocate(self, file: int, path: Path) -> None:
        try:
            os.posix_fallocate(file, 0, self.shape.file_bytes)
        except OSError:
            with suppress(OSError):
                path.unlink()  # what is half as large helps nobody
            raise


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _close(file: OpenFile) -> None:
    os.close(file.direct)
    os.close(file.headers)
