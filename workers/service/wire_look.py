"""A look at the bytes of a message before it is parsed: a stranger decides how many parts it has.

The parser makes an object of each part, and holds the interpreter until it is done: 8 million parts of two bytes take
it seconds and a gigabyte. This look stops at the first field that is unknown, and at the first part too many.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_PARTS = 1 << 16  # fields of a message and of those in it; the parser takes 15 ms for them
MAX_NUMBERS = 1 << 20  # in one packed field; the parser takes 10 ms for them
SLICE_PARTS = 256  # about a tenth of a millisecond
COUNTED_BYTES = 1 << 18  # of packed numbers at a time
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: FIXED_64,
    FieldDescriptor.TYPE_FIXED64: FIXED_64,
    FieldDescriptor.TYPE_SFIXED64: FIXED_64,
    FieldDescriptor.TYPE_FLOAT: FIXED_32,
    FieldDescriptor.TYPE_FIXED32: FIXED_32,
    FieldDescriptor.TYPE_SFIXED32: FIXED_32,
    FieldDescriptor.TYPE_STRING: BYTES,
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_MESSAGE: BYTES,
}


class Malformed(ValueError):
    """The bytes are no message of their kind, have too many parts, or a field of another version; the text names it."""


@dataclass(frozen=True)
class Field:
    """message: what it holds, if that is a message. packed: whether it may hold many numbers."""

    name: str  # dotted
    message: "MessageLayout | None" = None
    packed: bool = False


@dataclass(frozen=True)
class MessageLayout:
    """The fields that a message may hold, by tag: their number and their type on the wire."""

    name: str
    known: str
    fields: dict[int, Field]


@lru_cache
def layout_of(kind: Descriptor, name: str = "") -> MessageLayout:
    """name: dotted, of the field that holds the message; empty for a whole one."""
    fields: dict[int, Field] = {}
    for field in kind.fields:
        dotted = f"{name}.{field.name}" if name else field.name
        wire = WIRE_TYPES.get(field.type, VARINT)
        inner = None if field.message_type is None else layout_of(field.message_type, dotted)
        fields[field.number << 3 | wire] = Field(dotted, inner)
        if field.is_repeated and wire != BYTES:
            fields[field.number << 3 | BYTES] = Field(dotted, packed=True)
    known = ", ".join(field.name for field in kind.fields) or "none"
    return MessageLayout(name or kind.name, known, fields)


def look(data: bytes, layout: MessageLayout) -> Iterator[None]:
    """Yields after each SLICE_PARTS parts. Raises Malformed. Bytes that break off are left to the parser."""
    outer: list[tuple[int, MessageLayout]] = []
    at, end, parts = 0, len(data), 0
    try:
        while True:
            while at == end and outer:
                end, layout = outer.pop()
            if at >= end:  # beyond it a number stretches over the end of its message
                return
            parts += 1
            if not parts % SLICE_PARTS:
                _check_parts(parts)
                yield
            tag, at = _varint(data, at)
            field = layout.fields.get(tag)
            if field is None:
                raise Malformed(f"{layout.name} has unknown field number {tag >> 3}; this version knows {layout.known}")
            wire = tag & 7
            if wire == VARINT:
                _, at = _varint(data, at)
            elif wire == BYTES:
                size, at = _varint(data, at)
                if field.message is None or size > end - at:
                    if field.packed:
                        _check_numbers(data, at, size, field)
                    at += size
                else:
                    outer.append((end, layout))
                    end, layout = at + size, field.message
            else:
                at += 8 if wire == FIXED_64 else 4
    except IndexError:
        return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends. IndexError when the bytes break off."""
    value = data[at]
    at += 1
    if value > 127:
        value &= 127
        for shift in range(7, 70, 7):
            more = data[at]
            at += 1
            value |= (more & 127) << shift
            if more < 128:
                return value, at
        raise IndexError  # no number is that long
    return value, at


def _check_parts(parts: int) -> None:
    if parts > MAX_PARTS:
        raise Malformed(
            f"the message and its parts have more than {MAX_PARTS} fields, the most that are allowed (token ids are "
            "one field where they are packed, or token_bytes)"
        )


def _check_numbers(data: bytes, at: int, size: int, field: Field) -> None:
    """Counts the numbers of a packed field, and refuses too many. Each number ends with a byte below 128. It stops
    counting at the first one too many."""
    end, count = min(at + size, len(data)), 0
    if size <= MAX_NUMBERS:
        return
    for begin in range(at, end, COUNTED_BYTES):
        count += np.count_nonzero(np.frombuffer(data, np.uint8, min(COUNTED_BYTES, end - begin), begin) < 128)
        if count > MAX_NUMBERS:
            raise Malformed(
                f"{field.name} has more than {MAX_NUMBERS} numbers, the most that are allowed (send more as "
                "token_bytes)"
            )
