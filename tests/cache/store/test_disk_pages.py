"""Pages on a disk: found again by their writers' heirs, and by nobody else; errors are misses that are counted."""

import errno
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.disk import disk_pages, page_files
from tandem.cache.store.disk.disk_pages import DiskPages, DiskSpace, Reading
from tandem.cache.store.disk.entries import HEADER_BYTES, Entry
from tandem.cache.store.disk.folder import PageFolder, remove_left
from tandem.cache.store.disk.page_files import MOST_READS, FileShape
from tests.cache.store.disk_killer import PAGE_BYTES, content, space

SECONDS = 30.0


@contextmanager
def opened(at: Path | DiskSpace) -> Iterator[DiskPages]:
    disk = DiskPages(PAGE_BYTES, space(at) if isinstance(at, Path) else at)
    try:
        assert disk.settle(SECONDS)
        yield disk
    finally:
        disk.close()


def put(disk: DiskPages, group: int, *names: int) -> None:
    for name in names:
        disk.put(group, bytes([name]), content(group, name), lambda: True)
    assert disk.settle(SECONDS)


def found(disk: DiskPages, group: int, *names: int) -> list[bool]:
    """Returns which of these pages are there. Each that is there must have its content."""
    targets = [np.empty(PAGE_BYTES[group], np.uint8) for _ in names]
    reading = Reading(group, [bytes([name]) for name in names], targets)
    disk.read([reading])
    assert reading.done.wait(SECONDS)
    for name, target, there in zip(names, targets, reading.found.tolist(), strict=True):
        assert not there or np.array_equal(target, content(group, name))
    return reading.found.tolist()


def test_the_least_recently_used_pages_give_way(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        most = disk.counts.capacity // sum(PAGE_BYTES)
        put(disk, 0, *range(most))
        assert all(found(disk, 0, 0, 1))
        put(disk, 0, *range(most, most + 5))
        there = found(disk, 0, *range(most + 5))
        assert there[:2] == [True, True]
        assert sum(there) <= most + 1
        assert disk.take_removed()
    with opened(tmp_path) as disk:
        assert disk.counts.adopted == sum(there)
        assert len(disk.take_adopted()) == sum(there)


@pytest.mark.parametrize("is_direct", [True, False])
def test_pages_outlive_their_process(tmp_path: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_direct:
        monkeypatch.setattr(page_files.os, "O_DIRECT", 1 << 30)  # what no file system takes
    with opened(tmp_path) as disk:
        put(disk, 0, 1, 2)
        put(disk, 1, 2)
    with opened(tmp_path) as disk:
        assert (found(disk, 0, 1, 2, 3), found(disk, 1, 1, 2)) == ([True, True, False], [False, True])
        assert disk.counts[2:] == (0, 3, 0, 0, 0, 3)


def test_a_page_of_another_fingerprint_is_not_adopted(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        put(disk, 0, 1)
    with opened(space(tmp_path)._replace(fingerprint=b"fingerprint of 2")) as disk:
        assert (found(disk, 0, 1), disk.counts.adopted) == ([False], 0)
        put(disk, 0, 2)
    with opened(tmp_path) as disk:
        assert found(disk, 0, 1, 2) == [False, False]


def test_a_changed_byte_is_a_miss_that_is_counted(tmp_path: Path) -> None:
    """The byte is in a page or in its header."""
    random = Random(1)
    with opened(tmp_path) as disk:
        put(disk, 1, *range(8))
    (path,) = tmp_path.glob("group1-*.pages")
    shape = FileShape.within(PAGE_BYTES[1], space(tmp_path).num_bytes[1])
    with path.open("r+b") as file:
        for slot in range(4):
            size, begin = PAGE_BYTES[1], shape.table_bytes + slot * -(-PAGE_BYTES[1] // 4096) * 4096
            at = begin + random.randrange(size) if slot % 2 else slot * HEADER_BYTES + random.randrange(90)
            file.seek(at)
            was = file.read(1)
            file.seek(at)
            file.write(bytes([was[0] ^ 1 << random.randrange(8)]))
    with opened(tmp_path) as disk:
        assert found(disk, 1, *range(8)) == [False] * 4 + [True] * 4
        assert disk.counts.bad == 2
        assert disk.counts.adopted == 6
        put(disk, 1, 1)
        assert found(disk, 1, 1) == [True]


def test_a_page_that_went_before_it_was_written_is_lost(tmp_path: Path) -> None:
    with opened(tmp_path) as disk:
        disk.put(0, b"\1", content(0, 1), lambda: False)
        assert disk.settle(SECONDS)
        assert (disk.find(0, [b"\1"]).tolist(), disk.counts.lost, disk.counts.written) == ([False], 1, 0)


def test_no_more_pages_wait_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_pages, "MOST_WAITING", 2)
    going = threading.Event()

    def is_there() -> bool:
        going.wait(SECONDS)
        return True

    with opened(tmp_path) as disk:
        threads = [
            threading.Thread(target=disk.put, args=(0, bytes([name]), content(0, name), is_there)) for name in range(6)
        ]
        monkeypatch.setattr(disk, "_write", lambda of: going.wait(SECONDS))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        going.set()
        assert disk.settle(SECONDS)
        assert disk.counts.lost >= 3


@pytest.mark.parametrize("call", ["pwrite", "preadv", "posix_fallocate"])
def test_a_disk_that_fails_is_a_miss_that_is_counted(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path) as disk:
        if call == "preadv":
            put(disk, 0, 1)
        with monkeypatch.context() as patch:
            patch.setattr(page_files.os, call, full)
            put(disk, 0, 1)
            assert found(disk, 0, 1) == [False]
            assert disk.counts.failed >= 1
        put(disk, 0, 1, 2)
        assert found(disk, 0, 1, 2) == [True, True]


def test_several_pages_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most MOST_READS; nothing is written meanwhile."""
    together, preadv, pwrite = Barrier(MOST_READS), os.preadv, os.pwrite
    reading, most = [], []

    def slow_read(*of: Any) -> int:
        reading.append(of)
        most.append(len(reading))
        together.wait(SECONDS)
        try:
            return preadv(*of)
        finally:
            reading.pop()

    def write(*of: Any) -> int:
        assert not reading
        return pwrite(*of)

    with opened(tmp_path) as disk:
        names = range(2 * MOST_READS)
        put(disk, 0, *names)
        monkeypatch.setattr(page_files.os, "preadv", slow_read)
        monkeypatch.setattr(page_files.os, "pwrite", write)
        targets = [np.empty(PAGE_BYTES[0], np.uint8) for _ in names]
        wanted = Reading(0, [bytes([name]) for name in names], targets)
        disk.read([wanted])
        disk.put(0, b"new", content(0, 1), lambda: True)
        assert disk.settle(SECONDS)
        assert wanted.found.all()
        assert all(np.array_equal(target, content(0, name)) for name, target in zip(names, targets, strict=True))
        assert max(most) == MOST_READS
        assert disk.counts.failed == 0


def test_one_process_has_a_folder(tmp_path: Path) -> None:
    expected = rf"^cache\.disk_path: process {os.getpid()} uses .*; give a folder that no other cluster"
    with opened(tmp_path), pytest.raises(InvalidArgument, match=expected):
        PageFolder(tmp_path, 0, seconds=0.1)
    with opened(tmp_path):
        pass


def test_pages_of_removed_workers_go_with_the_next_start(tmp_path: Path) -> None:
    """Not those of workers that are there, of others' folders, or of a process that still runs."""
    names = ["worker0-rank0", "worker1-rank0", "worker2-rank0", "worker3-rank0", "mine"]
    spaces = {name: space(tmp_path / name) for name in names}
    for name in names:
        with opened(spaces[name]) as disk:
            put(disk, 0, 1)
    (tmp_path / "worker4-rank0").mkdir()  # nobody's: it has no lock
    (tmp_path / "worker5-rank0").symlink_to(tmp_path / "mine")
    siblings = frozenset(names[:2])
    with opened(spaces["worker3-rank0"]), opened(spaces["worker0-rank0"]._replace(siblings=siblings)) as disk:
        assert found(disk, 0, 1) == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*names[:2], "worker3-rank0", "mine", "worker4-rank0", "worker5-rank0"]
    )
    with opened(spaces["worker1-rank0"]) as disk:
        assert found(disk, 0, 1) == [True]
    with opened(spaces["worker2-rank0"]) as disk:
        assert found(disk, 0, 1) == [False]
        put(disk, 0, 1)


def test_a_worker_that_waits_for_a_folder_that_is_removed_makes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "worker1-rank0"
    before = PageFolder(path, 0)
    with ThreadPoolExecutor(1) as pool:
        after = pool.submit(PageFolder, path, 0, SECONDS)
        (path / "owner").unlink()
        before.close()
        folder = after.result(SECONDS)
    remove_left(tmp_path / "worker0-rank0", ())
    assert (path / "owner").read_text() == str(os.getpid())
    folder.close()
    remove_left(tmp_path / "worker0-rank0", ())
    assert not path.exists()


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidArgument, match=r"^cache\.disk_path: .*file/here cannot be written \(Not a directory\)"):
        DiskPages(PAGE_BYTES, space(file / "here"))
    usage = namedtuple("Usage", "total used free")(1, 1, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidArgument, match=r"^cache\.disk_bytes takes \d+ bytes .* has room for 1000; set fewer"):
        DiskPages(PAGE_BYTES, space(tmp_path / "full"))
    with pytest.raises(InvalidArgument, match=r"^cache\.disk_bytes gives the layer groups \[1, 1\] bytes; a page"):
        DiskPages(PAGE_BYTES, DiskSpace(tmp_path / "few", (1, 1), bytes(16)))
    assert not [thread for thread in threading.enumerate() if thread.name == "disk"]


def test_files_of_a_smaller_bound_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger one leaves them."""
    monkeypatch.setattr(page_files, "FILE_BYTES", 5 * (PAGE_BYTES[0] + 4096))
    many = space(tmp_path)
    with opened(many) as disk:
        put(disk, 0, *range(14))
        assert len(list(tmp_path.glob("group0-*.pages"))) == 3
    with opened(many._replace(num_bytes=(2 * many.num_bytes[0], many.num_bytes[1]))) as disk:
        assert all(found(disk, 0, *range(14)))
    with opened(many._replace(num_bytes=(many.num_bytes[0] // 2, many.num_bytes[1]))) as disk:
        assert sum(found(disk, 0, *range(14))) == 10
        assert len(list(tmp_path.glob("group0-*.pages"))) == 2


@pytest.mark.parametrize("num_bytes", [0, 4096, 70_000, 1 << 20, 3 << 30, (1 << 40) + 12345])
@pytest.mark.parametrize("page_bytes", [1, 4096, 12_000, 1 << 21, 3 << 30])
def test_files_take_no_more_than_their_bytes(page_bytes: int, num_bytes: int) -> None:
    shape = FileShape.within(page_bytes, num_bytes)
    assert shape.num_bytes <= num_bytes
    assert FileShape.within(page_bytes, FileShape.least_bytes(page_bytes)).num_slots >= 1
    if num_bytes >= 2 * FileShape.least_bytes(page_bytes):
        assert shape.num_slots * (page_bytes + 8192) > num_bytes / 3


def test_any_header_that_is_cut_or_changed_is_none() -> None:
    entry = Entry(bytes(range(16)), 3, b"name", 4096, 7, 1 << 63)
    packed = entry.pack()
    assert len(packed) == HEADER_BYTES
    assert Entry.unpack(packed) == entry
    for at in range(93):
        assert Entry.unpack(packed[:at] + bytes([packed[at] ^ 64]) + packed[at + 1 :]) is None
        assert Entry.unpack(packed[:at].ljust(HEADER_BYTES, b"\0")) is None
