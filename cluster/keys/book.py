"""The keys of one gateway process, as the file has them now."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import ConfigError, RateLimited, Unavailable
from tandem.cluster.keys.access import Access, KeyAccess
from tandem.cluster.keys.key import Key, digest_of
from tandem.cluster.keys.key_cells import KeyCells
from tandem.cluster.keys.key_file import read_keys
from tandem.cluster.keys.meter import Meter
from tandem.cluster.peers.key_counts import KeyCounts
from tandem.cluster.peers.table import GatewayTable

LOOK_SECONDS = 0.5  # between two looks at the file
TIDY_SECONDS = 3600.0
MAX_KEY = 512  # characters of what a caller shows
BEARER = "bearer "

log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """A file as it was when it was last read."""

    inode: int
    modified: int
    changed: int
    size: int


class KeyBook:
    """Knows callers by their keys. Owned by the gateway's event loop; look() and run() read the file in a thread.

    It reports a file that cannot be used once, and keeps the keys that it read before. A removed key's running requests
    go on.
    """

    def __init__(self, path: str, table: GatewayTable, failed: Callable[[], None], *, tells: bool = True) -> None:
        """failed: called for each change of the file that cannot be used. tells: whether this process logs and counts
        them; one of a host is enough."""
        self.stale = False
        """Whether the file has changed and cannot be used. The keys from before stay."""
        self._path = path
        self._cells = KeyCells(table)
        self._failed = failed
        self._tells = tells
        self._keys: dict[bytes, KeyAccess] | None = None  # by their digests; None: no file was read yet
        self._slotless: dict[bytes, Key] = {}  # keys that wait for a slot
        self._seen: _Seen | str | None = ""
        self._tidied = 0.0

    def all(self) -> Sequence[Key]:
        """The keys of the file."""
        return [access.key for access in (self._keys or {}).values()]

    def counts(self) -> KeyCounts:
        """The counts of keys on this host."""
        return self._cells.here(int(time.monotonic()))

    def find(self, credentials: Sequence[object]) -> Access | None:
        """Returns the key that a call shows. credentials: the values of the header `authorization`. Unavailable while
        no file was read, RateLimited while the key has no slot.

        A digest is looked up, not a key compared: how long that takes says nothing of a key.
        """
        shown = str(credentials[0]) if len(credentials) == 1 else ""
        if shown[: len(BEARER)].lower() != BEARER or len(shown) > MAX_KEY:
            return None
        if self._keys is None:
            raise Unavailable("this gateway process has not been able to read the keys file; try again, or elsewhere")
        digest = digest_of(shown[len(BEARER) :])
        if (key := self._slotless.get(digest)) is not None:
            raise RateLimited(
                f"this gateway process has no free slot to count the key {key.name!r}: the keys file has had too many "
                "names within a minute; try again in 1 s"
            )
        return self._keys.get(digest)

    def sums(self) -> dict[str, Int64Array]:
        """Returns the sums of this host's processes, int64 [len(Sum)], by the names of keys."""
        keys = sorted(self.all(), key=lambda key: key.id)
        sums = self._cells.all_sums(np.array([key.id for key in keys], np.int64))
        return dict(zip((key.name for key in keys), sums, strict=True))

    async def run(self) -> None:
        """Reads the file again when it changes, until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Reads the file if it has changed since the last look. Does not raise."""
        now = time.monotonic()
        if now - self._tidied >= TIDY_SECONDS:
            self._tidied = now
            self._cells.tidy(int(now))
        try:
            keys = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._fail(error)
            return
        if keys is not None:
            self.stale = False
            self._take(keys)
            if self._tells:
                log.info("%d keys are read from %s", len(keys), self._path)
        elif self._slotless:
            self._take([*self.all(), *self._slotless.values()])

    def _read(self) -> tuple[Key, ...] | None:
        """Returns the keys of the file if it has changed. Raises ConfigError, once for each state of the file."""
        seen = _look(self._path)
        if seen == self._seen:
            return None
        self._seen = seen  # also where it is bad: it is read again when it changes
        return read_keys(self._path)

    def _take(self, keys: Sequence[Key]) -> None:
        slots = self._cells.open({key.id for key in keys}, int(time.monotonic()))
        before = {access.name: access.meter for access in (self._keys or {}).values()}
        meters = {
            key.name: before.get(key.name) or Meter(self._cells, slots[key.id]) for key in keys if key.id in slots
        }
        self._keys = {key.sha256: KeyAccess(key, meters[key.name]) for key in keys if key.name in meters}
        self._slotless = {key.sha256: key for key in keys if key.name not in meters}

    def _fail(self, error: ConfigError) -> None:
        self.stale = True
        if self._tells:
            self._failed()
            kept = "no key is known" if self._keys is None else f"the {len(self._keys)} keys from before stay"
            log.error("%s; %s", error, kept)


def _look(path: str) -> _Seen | None:
    """Looks at the file. Returns None if there is none."""
    try:
        status = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return _Seen(status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
