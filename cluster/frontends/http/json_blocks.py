"""JSON in blocks of bounded size, so that no answer holds the event loop, however long it is.

The C encoder holds the interpreter until it has written all of a value. So a large list is encoded as its entries come,
and a large text in slices.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import numpy as np

# In ASCII: some clients take other characters of a text, U+2028 say, for the end of a line.
encode = json.JSONEncoder(separators=(",", ":")).encode
"""JSON as the HTTP frontend writes it: no spaces, no line ends."""

T = TypeVar("T")

BLOCK_BYTES = 1 << 16  # of a block; one has up to a slice more
SLICE = 1 << 13  # characters of a text, or numbers of an array, that are encoded at once
GROUP = 64  # plain values that are encoded at once
MOST_PIECES = 1024  # of a block: small ones take more time than they have bytes


class JsonList:
    """A list whose entries are encoded as they come. It holds their JSON, never the entries."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._open = bytearray()

    def extend(self, values: Sequence[object]) -> None:
        """Encodes more entries, all at once: as many as one message brings."""
        if values:
            self._add((encode(values)[1:-1].encode(),))

    def join(self, other: "JsonList") -> None:
        """Adds the entries of another one."""
        if other:
            self._add((*other._full, other._open))

    def __bool__(self) -> bool:
        return bool(self._full or self._open)

    @property
    def blocks(self) -> Iterator[bytes]:
        """Returns the list's JSON."""
        return chain((b"[",), self._full, (bytes(self._open), b"]"))

    def _add(self, entries: Iterable[bytes | bytearray]) -> None:
        """Adds entries with their commas, cut anywhere."""
        if self:
            self._open += b","
        for part in entries:
            self._open += part
            if len(self._open) >= BLOCK_BYTES:
                self._full.append(bytes(self._open))
                self._open.clear()


def json_blocks(value: object, begin: bytes = b"", end: bytes = b"") -> Iterator[bytes]:
    """The JSON of a value, which beside JSON's own types may have a JsonList, or an array of integers.

    Each block has at most some BLOCK_BYTES, and is made when it is asked for. begin, end: what stands around the JSON.
    """
    if _left_of(SLICE, value) >= 0:  # as most are
        yield begin + encode(value).encode() + end
        return
    held: list[bytes] = []
    size = 0
    for piece in chain((begin,), _pieces(value), (end,)):
        if len(piece) >= BLOCK_BYTES:  # a JsonList's own; no second one is needed
            if held:
                yield b"".join(held)
            yield piece
            held, size = [], 0
            continue
        held.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES or len(held) >= MOST_PIECES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _left_of(most: int, value: object) -> int:
    """Returns how many of `most` characters a plain value leaves, with 8 for a number; less than 0 for other types."""
    if isinstance(value, str):
        return most - len(value)
    if value is None or isinstance(value, int | float):
        return most - 8
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        return -1
    for part in parts:
        most = _left_of(most - 8, part)
        if most < 0:
            break
    return most


def _pieces(value: object) -> Iterator[bytes]:
    if isinstance(value, str):
        yield b'"'
        for begin in range(0, len(value), SLICE):
            yield encode(value[begin : begin + SLICE])[1:-1].encode()
        yield b'"'
    elif isinstance(value, dict):
        yield from _enclosed(b"{", map(_fields, _groups(value.items(), itemgetter(1))), b"}")
    elif isinstance(value, list | tuple):
        yield from _enclosed(b"[", map(_entries, _groups(value, lambda entry: entry)), b"]")
    elif isinstance(value, JsonList):
        yield from value.blocks
    elif isinstance(value, np.ndarray):
        slices = (value[begin : begin + SLICE].tolist() for begin in range(0, len(value), SLICE))
        yield from _enclosed(b"[", ((encode(one)[1:-1].encode(),) for one in slices), b"]")
    else:
        yield encode(value).encode()


def _enclosed(begin: bytes, groups: Iterable[Iterable[bytes]], end: bytes) -> Iterator[bytes]:
    separator = b""
    yield begin
    for group in groups:
        yield separator
        yield from group
        separator = b","
    yield end


def _fields(group: Sequence[tuple[str, object]]) -> Iterator[bytes]:
    (name, first), *_ = group
    if _is_plain(first):
        yield encode(dict(group))[1:-1].encode()
    else:
        yield encode(name).encode() + b":"
        yield from _pieces(first)


def _entries(group: Sequence[object]) -> Iterator[bytes]:
    if _is_plain(group[0]):
        yield encode(group)[1:-1].encode()
    else:
        yield from _pieces(group[0])


def _groups(entries: Iterable[T], value_of: Callable[[T], object]) -> Iterator[Sequence[T]]:
    """Groups the entries that are encoded at once: up to GROUP neighbours with plain values, and each other entry
    alone."""
    plain: list[T] = []
    for entry in entries:
        is_plain = _is_plain(value_of(entry))
        if plain and (not is_plain or len(plain) == GROUP):
            yield plain
            plain = []
        if is_plain:
            plain.append(entry)
        else:
            yield (entry,)
    if plain:
        yield plain


def _is_plain(value: object) -> bool:
    """Returns whether encoding the value takes no time."""
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and len(value) <= SLICE)
