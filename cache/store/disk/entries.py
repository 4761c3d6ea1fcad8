"""The header that describes a page on disk, so that it is found again however its writer ended."""

from hashlib import blake2b
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int64Array

MAGIC, VERSION = b"TANDEMKV", 1
HEADER_BYTES = 128
MAX_DIGEST = 32
FIELDS = Struct("<8sII16sB32sQQQ")
CHECKSUM = Struct("<I")
WEIGHT_SEED = 1
WORD = 1 << 64


class Entry(NamedTuple):
    """A page on disk. fingerprint: 16 bytes that tell layouts, weights and shards apart. digest: its name, at most 32
    bytes. length: bytes of the page. number: grows with each write. sum: see PageSum."""

    fingerprint: bytes
    group: int
    digest: bytes
    length: int
    number: int
    sum: int

    def pack(self) -> bytes:
        """Returns HEADER_BYTES bytes that unpack() takes."""
        name = len(self.digest), self.digest
        fields = FIELDS.pack(MAGIC, VERSION, self.group, self.fingerprint, *name, self.length, self.number, self.sum)
        return (fields + CHECKSUM.pack(crc32(fields))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, header: bytes) -> "Entry | None":
        """Returns the entry of a header; None if the bytes are no whole header of this version."""
        fields = header[: FIELDS.size]
        if not header.startswith(MAGIC) or CHECKSUM.unpack_from(header, FIELDS.size)[0] != crc32(fields):
            return None
        _, version, group, fingerprint, size, digest, length, number, total = FIELDS.unpack(fields)
        if version != VERSION or size > MAX_DIGEST:
            return None
        return cls(fingerprint, group, digest[:size], length, number, total)


class PageSum:
    """Σ word · odd weight + a hash of the header, modulo 2⁶⁴: one changed word always changes it, and so does another
    name or another layout."""

    def __init__(self, num_bytes: int) -> None:
        """num_bytes: of a page."""
        weights = np.random.default_rng(WEIGHT_SEED).integers(-(1 << 62), 1 << 62, -(-num_bytes // 8))
        self._weights: Int64Array = weights | 1

    def of(self, words: Int64Array, entry: Entry) -> int:
        """words: a page and zeros after it, int64 [n]."""
        header = entry._replace(sum=0).pack()
        return (int(np.dot(words, self._weights)) + int.from_bytes(blake2b(header, digest_size=8).digest())) % WORD


def words_of(page: NDArray[np.uint8]) -> Int64Array:
    """Returns a page as int64, without a copy if it is aligned and fills whole words."""
    if page.size % 8 == 0 and page.ctypes.data % 8 == 0:
        return page.view(np.int64)
    padded = np.zeros(-(-page.size // 8), np.int64)
    padded.view(np.uint8)[: page.size] = page
    return padded
