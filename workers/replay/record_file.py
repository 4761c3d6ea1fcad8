"""A record's file: two lines of text, then entries.

 TANDEMREC 1                                     the format's version
 {"tandem": …, "config": …, …} crc32             a Header
 size, crc32: 4 bytes, stamp: 8 bytes, little end first     of each entry; size bytes follow, which a Decoder reads

The stamp is when an action began, in nanoseconds since the record did, at least 1. That of other entries is 0.
"""

import json
import logging
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, get_args, get_type_hints
from zlib import crc32

from tandem import __version__
from tandem.transfer.island_ranks import MAX_RANKS
from tandem.workers.config import AdapterSettings, ParkingSettings, Role, SpeculationSettings, WorkerConfig
from tandem.workers.logs import LogSettings
from tandem.workers.replay.errors import BadRecord, RecordError

log = logging.getLogger(__name__)
MAGIC = "TANDEMREC"
VERSION = 1
FRAME = struct.Struct("<IIQ")
MAX_PES = 4096
RUN_DIGITS = 16
MAX_HEADER_BYTES = 1 << 20
MAX_ENTRY_BYTES = 1 << 30
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Header:
    """The worker that was recorded, and the time.

    num_pages: of every pool, as Worker.open() got it. layout: KVLayout.fingerprint. model: SHA-256 of the checkpoint's
    config.json. host: the boot of the host; only its records share a clock. run: equal for all workers of one start of
    a cluster: a digest of their shared secret. began: on that clock, in nanoseconds. prompts: whether the record has
    token ids. types: of its values, and their fields.
    """

    config: WorkerConfig
    num_pages: int
    layout: int
    model: str
    host: str
    run: str
    began: int
    prompts: bool
    types: list[list[str]]
    tandem: str

    @classmethod
    def of(cls, config: WorkerConfig, num_pages: int, layout: int, types: list[list[str]]) -> "Header":
        """Makes the header of a worker that begins now. The header has no secret of the worker's, and no epochs of its
        peers: a replay makes peers of the worker's own."""
        prompts = config.record is not None and config.record.prompts
        public = replace(config, token="", logging=LogSettings(), record=None, epochs=())
        model, host = model_digest(Path(config.model_path)), BOOT_ID.read_text().strip()
        run = sha256(f"{MAGIC} {config.token}".encode()).hexdigest()[:RUN_DIGITS]
        return cls(public, num_pages, layout, model, host, run, time.monotonic_ns(), prompts, types, __version__)

    def line(self) -> bytes:
        text = json.dumps(asdict(self)).encode()
        return b"%s %08x\n" % (text, crc32(text))

    @classmethod
    def read(cls, line: bytes) -> "Header":
        """Reads a header. BadRecord unless line() can have written it."""
        line, _, checksum = line.rstrip(b"\n").rpartition(b" ")
        if checksum != b"%08x" % crc32(line):
            raise BadRecord("its header is damaged")
        try:
            values: dict[str, Any] = json.loads(line)
            given = values.pop("config")
            speculation, role = SpeculationSettings(**given.pop("speculation")), Role(given.pop("role"))
            parking, adapters = ParkingSettings(**given.pop("parking")), AdapterSettings(**given.pop("adapters"))
            del given["logging"], given["record"]
            given |= {name: tuple(given[name]) for name in ("ranks", "epochs") if isinstance(given[name], list)}
            parts = {"speculation": speculation, "parking": parking, "adapters": adapters}
            header = cls(config=WorkerConfig(role=role, **parts, **given), **values)
            config = header.config
            for part in (header, config, *parts.values()):
                _check_values(part)
            if config.pe >= config.num_pes or config.num_pes > MAX_PES:
                raise BadRecord(f"its header has PE {config.pe} of {config.num_pes}; at most {MAX_PES} PEs are allowed")
            _check_ranks(config)
            if config.epochs != ():
                raise BadRecord(f"its header has epochs {config.epochs!r:.40}; it must have none")
            return header
        except BadRecord:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadRecord(f"its header cannot be read: {error!r:.200}") from error


def _check_ranks(config: WorkerConfig) -> None:
    """BadRecord unless it leads, and each worker of the island has some ranks."""
    ranks: object = config.ranks
    numbers = isinstance(ranks, tuple) and all(type(one) is int and 1 <= one <= MAX_RANKS for one in ranks)
    if not numbers or len(config.ranks) not in (0, config.num_pes) or config.island_ranks.processes > MAX_PES:
        raise BadRecord(
            f"its header has ranks {ranks!r:.40}; it must have none, or a number of 1 to {MAX_RANKS} for each of "
            f"{config.num_pes} PEs, {MAX_PES} at most together"
        )
    if config.rank:
        raise BadRecord(f"its header has rank {config.rank}; it must be 0, which leads the others")


def _check_values(part: Header | WorkerConfig | SpeculationSettings | ParkingSettings | AdapterSettings) -> None:
    """BadRecord unless its fields have values of their types, and numbers are not negative."""
    for name, kind in get_type_hints(type(part)).items():
        value, accepted = getattr(part, name), get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if any(isinstance(one, GenericAlias) for one in accepted):
            continue  # types, which are compared as a whole
        if type(value) not in accepted and not (float in accepted and type(value) is int):
            names = " or ".join("null" if one is NoneType else one.__name__ for one in accepted)
            raise BadRecord(f"its header's {name} is {value!r:.40}; it must be {names}")
        if isinstance(value, int | float) and not (value >= 0 and (type(value) is float or value < 1 << 64)):
            raise BadRecord(f"its header's {name} is {value!r:.40}; it must be at least 0 and have at most 64 bits")


def model_digest(folder: Path) -> str:
    """Returns a digest that identifies a model."""
    return sha256((folder / "config.json").read_bytes()).hexdigest()


class RecordWriter:
    """Writes entries to a new file that only its owner may read. Owned by one thread, which never waits for a disk but
    where the kernel's own buffers are full."""

    def __init__(self, folder: Path, name: str, header: Header, max_bytes: int) -> None:
        """name: of the file; where there is one, a number goes after it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._fd = _create(folder, name)
        self._room = max_bytes
        self._append(f"{MAGIC} {VERSION}\n".encode() + header.line())

    def takes(self, entry: bytes, spare: int = 0) -> bool:
        """Whether the entry fits, and leaves so many bytes."""
        return len(entry) + FRAME.size + spare <= self._room

    def write(self, entry: bytes, stamp: int = 0) -> None:
        """Raises OSError."""
        self._append(FRAME.pack(len(entry), crc32(entry), stamp) + entry)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: bytes) -> None:
        self._room -= len(data)
        written = os.write(self._fd, data)
        if written != len(data):  # a disk that is full
            os.write(self._fd, data[written:])


def _create(folder: Path, name: str) -> tuple[Path, int]:
    number = 1
    while True:
        path = folder / (f"{name}.tandemrec" if number == 1 else f"{name}-{number}.tandemrec")
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        number += 1


class RecordReader:
    """The header and the entries of a file. Raises BadRecord, which names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = False  # whether the file ends within an entry; known once all were read
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise RecordError(f"{path}: cannot be read: it is no file")
        try:
            with path.open("rb") as file:
                first, line = file.readline(len(MAGIC) + 16), file.readline(MAX_HEADER_BYTES)
                self._begin = file.tell()
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
        magic, _, number = first.decode("ascii", "replace").strip().partition(" ")
        if magic != MAGIC:
            raise BadRecord(f"{path}: it begins with {first[:16]!r}; a record begins with {MAGIC}")
        if number != str(VERSION):
            raise BadRecord(f"{path}: its format is of version {number:.16}; {VERSION} is understood")
        try:
            self.header = Header.read(line)
        except BadRecord as error:
            raise BadRecord(f"{path}: {error}") from error

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """Stamps and entries, up to the end, or to where a crash cut the file."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(self._begin)
            while frame := file.read(FRAME.size):
                length, expected, stamp = FRAME.unpack(frame) if len(frame) == FRAME.size else (0, 0, 0)
                if not length:
                    self.cut = True
                    return
                if length > MAX_ENTRY_BYTES:
                    raise BadRecord(f"{self.path}: an entry has {length} bytes; it may have at most {MAX_ENTRY_BYTES}")
                at = file.tell()
                entry = file.read(length)
                if crc32(entry) != expected:
                    if at + length < size:
                        raise BadRecord(f"{self.path}: the entry at byte {at} is not as it was written")
                    self.cut = True
                    return
                yield stamp, entry
