"""Makes bad input from good: bytes that are no message, and messages whose fields hold wrong values."""

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

UNSIGNED = (0, 1, 2, 7, 8, 63, 64, 95, 96, 97, 127, 128, 198, 199, 255, 256, 257, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
WIDE = (*UNSIGNED, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED = (-(2**31), -65536, -2, -1, 0, 1, 2, 3, 198, 199, 2**31 - 1)
REAL = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-45, 1e-38, 0.5, 1.0, 1.0000001, 100.0, 100.1, 3e38)
TEXT = ("", "\0", " ", "a", "a" * 127, "a" * 129, "é" * 300, "💥" * 65, "\n\r\t", "%s{}{{%", "../../x", "a" * 70_000)
NEST = 200  # deeper than protobuf's parser goes

MAX_BYTES = 300_000


def flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def drop(rng: random.Random, data: bytearray) -> None:
    begin = rng.randrange(len(data) + 1)
    del data[begin : begin + rng.randrange(1, 9)]


def double(rng: random.Random, data: bytearray) -> None:
    begin = rng.randrange(len(data) + 1)
    piece = data[begin : begin + rng.choice((1, 4, 40))]
    data[begin:begin] = piece * rng.choice((1, 1, 100))


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))


def add_field(rng: random.Random, data: bytearray) -> None:
    """Adds any field number with any wire type, the group types and the reserved ones included."""
    number, kind = rng.choice((0, *range(1, 14), 99, 2**29 - 1)), rng.randrange(8)
    value = {0: varint(rng.choice(WIDE)), 1: rng.randbytes(8), 2: varint(rng.choice((0, 3, 2**31))) + b"\xff\xfe\xfd"}
    data += varint(number << 3 | kind) + value.get(kind, rng.randbytes(4))


def nest(rng: random.Random, data: bytearray) -> None:
    """Puts the whole inside one field inside another, or into groups within groups."""
    number = rng.randrange(1, 8)
    if rng.random() < 0.3:
        data[:] = varint(number << 3 | 3) * NEST + data + varint(number << 3 | 4) * rng.choice((NEST, NEST - 1))
        return
    for _ in range(rng.choice((1, 2, NEST))):
        data[:] = varint(number << 3 | 2) + varint(len(data)) + data


BYTES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    flip, overwrite, truncate, drop, double, insert, add_field, nest,
)  # fmt: skip


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(BYTES)(rng, result)
    return bytes(result[:MAX_BYTES])


def varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(result) + bytes((value,))


def mutate_field(rng: random.Random, message: Message) -> None:
    """Gives one field of the message, or of one inside it, a value from the edges of its type."""
    field: Any = rng.choice(message.DESCRIPTOR.fields)
    held: Any = getattr(message, field.name)
    if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
        _mutate_map(rng, field.message_type, held)
    elif field.is_repeated:
        _mutate_list(rng, field, held)
    elif field.message_type is None:
        if field.has_presence and rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, edge(rng, field))
    elif rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        held.SetInParent()
        mutate_field(rng, held)


def _mutate_list(rng: random.Random, field: FieldDescriptor, held: Any) -> None:
    deed = rng.randrange(4)
    if deed == 0:
        del held[rng.randrange(len(held) + 1) :]
    elif field.message_type is not None:
        for _ in range(rng.choice((1, 1, 300))):
            mutate_field(rng, held.add())
    elif deed == 1 and held:
        held[rng.randrange(len(held))] = edge(rng, field)
    elif deed == 2:
        held.extend([edge(rng, field)] * rng.choice((1, 2, 17, 65, 20_000 if field.type != field.TYPE_STRING else 20)))
    else:
        held.append(edge(rng, field))


def _mutate_map(rng: random.Random, entry: Descriptor, held: Any) -> None:
    if rng.random() < 0.2:
        held.clear()
    for _ in range(rng.choice((1, 1, 17, 2_000))):
        held[_edge_or_random(rng, entry.fields_by_name["key"])] = edge(rng, entry.fields_by_name["value"])


def _edge_or_random(rng: random.Random, key: FieldDescriptor) -> Any:
    return edge(rng, key) if rng.random() < 0.2 else rng.randrange(1 << 16)


def edge(rng: random.Random, field: FieldDescriptor) -> Any:
    kinds: dict[int, Callable[[], Any]] = {
        FieldDescriptor.CPPTYPE_UINT32: lambda: rng.choice(UNSIGNED),
        FieldDescriptor.CPPTYPE_UINT64: lambda: rng.choice(WIDE),
        FieldDescriptor.CPPTYPE_INT32: lambda: rng.choice(SIGNED),
        FieldDescriptor.CPPTYPE_FLOAT: lambda: rng.choice(REAL),
        FieldDescriptor.CPPTYPE_DOUBLE: lambda: rng.choice(REAL),
        FieldDescriptor.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        FieldDescriptor.CPPTYPE_STRING: lambda: rng.choice(TEXT),
    }
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 6, 40)))
    return kinds[field.cpp_type]()
