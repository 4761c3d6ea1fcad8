"""Pages on a local disk, which one thread writes and reads."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.disk.entries import Entry, PageSum, words_of
from tandem.cache.store.disk.folder import PageFolder, remove_left
from tandem.cache.store.disk.page_files import MOST_READS, Bytes, FileShape, PageFiles
from tandem.cache.store.shelf import Shelf

log = logging.getLogger(__name__)
MOST_WAITING = 1 << 16  # pages that wait to be written, by name: their bytes are in host memory
FORGET = 0.8  # what earlier reads count beside the newest
CLOSE_SECONDS = 10.0
LOG_SECONDS = 60.0  # between two lines about errors


class DiskSpace(NamedTuple):
    """folder: of this rank of this worker alone. num_bytes: of each layer group, all files included. fingerprint: 16
    bytes that tell apart what pages must not be mixed: weights, layouts, shards. siblings: the names of the folders
    beside this one that other ranks and workers may use; other folders belong to workers that were removed."""

    folder: Path
    num_bytes: Sequence[int]
    fingerprint: bytes
    siblings: frozenset[str] | None = None


class DiskCounts(NamedTuple):
    """capacity, used: bytes of pages. The others count since the disk was opened. written, read: pages. bad: pages
    that were not what their headers say. lost: pages that left host memory before they could be written. failed: reads
    and writes that failed. adopted: pages that an earlier process had left."""

    capacity: int = 0
    used: int = 0
    written: int = 0
    read: int = 0
    bad: int = 0
    lost: int = 0
    failed: int = 0
    adopted: int = 0


@dataclass(eq=False)
class Reading:
    """Pages of one group that are read into places of their own. found: bool [n], once done is set. also: is called on
    the disk's thread with each page that was found; results: what it gave, int64 [n]."""

    group: int
    digests: Sequence[bytes]
    targets: Sequence[Bytes]
    also: Callable[[Bytes], int] | None = None
    results: Int64Array = field(init=False)
    found: NDArray[np.bool_] = field(init=False)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.found, self.results = np.zeros(len(self.digests), np.bool_), np.zeros(len(self.digests), np.int64)


class _Writing(NamedTuple):
    """is_there: whether the page is still what the digest names, for its place may be another's by now."""

    group: int
    digest: bytes
    page: Bytes
    is_there: Callable[[], bool]


class DiskPages:
    """The least recently used pages give way. Any thread may call it; a thread of its own does all that may wait for
    the disk, reads before writes. It has up to MOST_READS pages read at once, and writes while nothing is read.

    What an earlier process has left under the same fingerprint is found again. A page is compared with the sum in its
    header each time it is read, so what a killed process had half written is a miss.
    """

    def __init__(self, page_bytes: Sequence[int], space: DiskSpace) -> None:
        """page_bytes: of each layer group. Raises InvalidArgument, see PageFolder, and where a group has no room for a
        page."""
        shapes = [FileShape.within(*of) for of in zip(page_bytes, space.num_bytes, strict=True)]
        if not all(shape.num_slots for shape, given in zip(shapes, space.num_bytes, strict=True) if given):
            raise InvalidArgument(
                f"cache.disk_bytes gives the layer groups {list(space.num_bytes)} bytes; a page of each and its header "
                f"must fit, of {list(page_bytes)} bytes"
            )
        self._fingerprint, self._shapes, self._siblings = space.fingerprint, shapes, space.siblings
        self._folder = PageFolder(space.folder, sum(shape.num_bytes for shape in shapes))
        self._files = [PageFiles(space.folder, group, shape) for group, shape in enumerate(shapes)]
        self._sums = [PageSum(num_bytes) for num_bytes in page_bytes]
        self._changed = threading.Condition()  # guards all below
        self._shelves = [Shelf(shape.num_slots) for shape in shapes]
        self._entries: list[dict[bytes, Entry]] = [{} for _ in shapes]  # of pages that are written as a whole
        self._waiting: list[dict[bytes, None]] = [{} for _ in shapes]
        self._readings: deque[Reading] = deque()
        self._writings: deque[_Writing] = deque()
        self._adopted: list[bytes] = []
        self._removed: list[bytes] = []
        self._number = 0
        self._busy = self._stopping = self._scanned = False
        self._counts = DiskCounts(sum(shape.num_slots * shape.page_bytes for shape in shapes))
        self._past_bytes = self._past_seconds = 0.0
        self._logged = -LOG_SECONDS
        self._readers = ThreadPoolExecutor(MOST_READS, "disk read")
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def put(self, group: int, digest: bytes, page: Bytes, is_there: Callable[[], bool]) -> None:
        """Writes a page, uint8 [page_bytes], later, if it is still there then. A page that is known counts as used."""
        with self._changed:
            if digest in self._entries[group]:
                self._shelves[group].put(digest)
            elif digest not in self._waiting[group]:
                if len(self._writings) >= MOST_WAITING:
                    self._count(lost=1)
                    return
                self._waiting[group][digest] = None
                self._writings.append(_Writing(group, digest, page, is_there))
                self._changed.notify_all()

    def has(self, digest: bytes) -> bool:
        """Returns whether it has a page of that name in any group."""
        with self._changed:
            return any(digest in entries for entries in self._entries)

    def find(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """Returns which pages of a group are written, bool [n]."""
        with self._changed:
            return np.array([digest in self._entries[group] for digest in digests], np.bool_)

    def digests(self) -> list[bytes]:
        """Returns the digests of all pages. A digest may occur for several groups."""
        with self._changed:
            return [digest for entries in self._entries for digest in entries]

    def take_adopted(self) -> list[bytes]:
        """Returns the digests of pages that were found here at the start, since the last call."""
        with self._changed:
            adopted, self._adopted = self._adopted, []
            return adopted

    def take_removed(self) -> list[bytes]:
        """Returns the digests of pages that went since the last call."""
        with self._changed:
            removed, self._removed = self._removed, []
            return removed

    def read(self, readings: Sequence[Reading]) -> None:
        """Begins to read. The targets are the thread's until each is done."""
        with self._changed:
            if not self._stopping:
                self._readings += readings
                self._changed.notify_all()
                return
        for reading in readings:
            reading.done.set()

    def settle(self, seconds: float) -> bool:
        """Waits until all pages asked for are written and read. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, seconds)

    @property
    def rate(self) -> float:
        """Bytes a second that reads have moved lately; 0 before the first."""
        with self._changed:
            return self._past_bytes / self._past_seconds if self._past_seconds else 0.0

    @property
    def counts(self) -> DiskCounts:
        with self._changed:
            sizes = zip(self._entries, self._shapes, strict=True)
            return self._counts._replace(used=sum(len(entries) * shape.page_bytes for entries, shape in sizes))

    def close(self) -> None:
        """Ends the thread after its present page. Pages that wait are not written. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._folder.close()

    def _is_idle(self) -> bool:
        return self._scanned and not (self._busy or self._readings or self._writings)

    def _run(self) -> None:
        try:
            self._scan()
            if self._siblings is not None:
                remove_left(self._folder.path, self._siblings)
            while (job := self._next()) is not None:
                if isinstance(job, Reading):
                    self._read(job)
                else:
                    self._write(job)
        finally:
            with self._changed:
                self._stopping = True
                left, self._readings = list(self._readings), deque()
            for reading in left:
                reading.done.set()
            self._readers.shutdown()
            for files in self._files:
                files.close()

    def _next(self) -> "Reading | _Writing | None":
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or self._readings or self._writings)
            if self._stopping:
                return None
            self._busy = True
            return self._readings.popleft() if self._readings else self._writings.popleft()

    def _scan(self) -> None:
        """Finds the pages that are on the disk already, with the newest write of each."""
        for group, (files, shape) in enumerate(zip(self._files, self._shapes, strict=True)):
            found: dict[bytes, tuple[int, Entry]] = {}
            try:
                for slot, entry in files.entries():
                    if self._stopping:
                        return
                    known = found.get(entry.digest)
                    if self._is_own(entry, group, shape) and (known is None or known[1].number < entry.number):
                        found[entry.digest] = slot, entry
            except OSError as error:
                self._fail("the pages that are there cannot be listed", error)
            ordered = sorted(found.items(), key=lambda one: one[1][1].number)
            entries, shelf = {digest: entry for digest, (_, entry) in ordered}, Shelf(shape.num_slots)
            shelf.adopt({digest: slot for digest, (slot, _) in ordered})
            with self._changed:  # others wait for it: there may be a million
                self._shelves[group], self._entries[group] = shelf, entries
                self._adopted += found
                self._number = max([self._number, *(entry.number for _, entry in found.values())])
                self._count(adopted=len(found))
        with self._changed:
            self._scanned = True

    def _is_own(self, entry: Entry, group: int, shape: FileShape) -> bool:
        return (entry.fingerprint, entry.group, entry.length) == (self._fingerprint, group, shape.page_bytes)

    def _write(self, of: _Writing) -> None:
        group, digest = of.group, of.digest
        files, length = self._files[group], self._shapes[group].page_bytes
        page = files.stage(of.page)
        with self._changed:
            self._waiting[group].pop(digest, None)
            if not of.is_there():
                self._count(lost=1)
                return
            self._number += 1
            entry = Entry(self._fingerprint, group, digest, length, self._number, 0)
            slot = self._shelves[group].put(digest)
            self._drop_forgotten(group)
        if slot is None:
            return
        try:
            entry = entry._replace(sum=self._sums[group].of(words_of(page), entry))
            files.write(slot, entry)
        except OSError as error:
            with self._changed:
                self._shelves[group].drop(digest)
                self._drop_forgotten(group)
            self._fail("a page cannot be written", error)
            return
        with self._changed:
            self._entries[group][digest] = entry
            self._count(written=1)

    def _read(self, reading: Reading) -> None:
        began, num_bytes, pages = time.perf_counter(), 0, list(zip(reading.digests, reading.targets, strict=True))
        for begin in range(0, len(pages), MOST_READS):
            if self._stopping:
                break
            some = pages[begin : begin + MOST_READS]
            found = self._read_pages(reading.group, some)
            reading.found[begin : begin + MOST_READS] = found
            num_bytes += sum(target.size for _, target in some)
            if reading.also is not None:
                for index in np.flatnonzero(found).tolist():
                    reading.results[begin + index] = reading.also(some[index][1])
        with self._changed:
            self._past_bytes = FORGET * self._past_bytes + num_bytes
            self._past_seconds = FORGET * self._past_seconds + time.perf_counter() - began
        reading.done.set()

    def _read_pages(self, group: int, pages: Sequence[tuple[bytes, Bytes]]) -> list[bool]:
        """Reads all pages at once, at most MOST_READS. Returns which of the pages are there, as their headers say."""
        with self._changed:
            shelf, entries = self._shelves[group], [self._entries[group].get(digest) for digest, _ in pages]
            known = [index for index, entry in enumerate(entries) if entry is not None]
            slots = shelf.slots(pages[index][0] for index in known)
            for index in known:
                shelf.put(pages[index][0])  # the last used now
        reads = [
            self._reader(group, slot, pages[index][1], number)
            for number, (index, slot) in enumerate(zip(known, slots, strict=True))
        ]
        errors = self._readers.map(_error_of, reads) if len(reads) > 1 else map(_error_of, reads)
        found = [False] * len(pages)
        for index, error in zip(known, errors, strict=True):
            digest, target = pages[index]
            entry = entries[index]
            assert entry is not None
            if error is not None:
                self._fail("a page cannot be read", error)
                continue
            found[index] = self._sums[group].of(words_of(target), entry) == entry.sum
            with self._changed:
                if found[index]:
                    self._count(read=1)
                else:
                    self._shelves[group].drop(digest)
                    self._drop_forgotten(group)
                    self._count(bad=1)
        return found

    def _reader(self, group: int, slot: int, target: Bytes, number: int) -> Callable[[], None]:
        try:
            return self._files[group].reader(slot, target, number)
        except OSError as error:  # its file cannot be opened
            return partial(_raise, error)

    def _drop_forgotten(self, group: int) -> None:
        """Drops the entries of pages that a shelf has forgotten."""
        for digest in self._shelves[group].take_forgotten():
            if self._entries[group].pop(digest, None) is not None:
                self._removed.append(digest)

    def _count(self, **more: int) -> None:
        now = self._counts
        self._counts = now._replace(**{name: getattr(now, name) + count for name, count in more.items()})

    def _fail(self, what: str, error: OSError) -> None:
        with self._changed:
            self._count(failed=1)
            now = time.monotonic()
            if now - self._logged < LOG_SECONDS:
                return
            self._logged = now
        log.error("cache.disk_path: %s in %s: %s", what, self._folder.path, error)


def _raise(error: OSError) -> None:
    raise error


def _error_of(read: Callable[[], None]) -> OSError | None:
    try:
        read()
    except OSError as error:
        return error
    return None
