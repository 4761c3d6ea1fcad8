"""Values of actions as bytes, and back: a strict format that runs no code and keeps within the bytes that it is given.

value    tag, 1 byte; then, by its tag
  int      varint, zigzag             float    8 bytes
  bytes    varint n, n bytes          str      the same, UTF-8
  tuple    varint n, n values         list, set, dict   the same; a dict has keys and values in turn
  array    varint of its dtype, varint ndim, varints of its shape, its elements in C order, little end first
  objects  varint n, n values: a one-dimensional array of objects
  record   varint of its type among those registered, its fields
  shared   varint of its number, a record      the first time that an object which has an identity is seen
  known    varint of its number                each time after that, and for the result of an action
"""

import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from tandem.workers.replay.errors import BadRecord, NotAValue

DTYPES = tuple(map(np.dtype, ("<i8", "<i4", "<u8", "<u4", "<i2", "<u1", "<f8", "<f4", "?")))
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
MOST_NESTED = 24
FLOAT = struct.Struct("<d")
LONG = 16  # ints of a tuple, from which on they are written together


class Tag(IntEnum):
    NONE, FALSE, TRUE, INT, FLOAT, BYTES, STR = range(7)
    TUPLE, LIST, SET, DICT, INTS, ARRAY, OBJECTS = range(7, 14)
    RECORD, SHARED, KNOWN = range(14, 17)


class ValueType(NamedTuple):
    """A NamedTuple or frozen dataclass that may be recorded. shared: it has an identity, which a replay keeps. secret:
    what stands in place of a field's value where prompts are not recorded."""

    type: type
    shared: bool = False
    secret: Mapping[str, Callable[[Any], Any]] = {}

    @property
    def fields(self) -> tuple[str, ...]:
        if is_dataclass(self.type):
            return tuple(field.name for field in fields(self.type) if field.init)
        return self.type._fields  # type: ignore[attr-defined]


class Known(NamedTuple):
    """A result that had no value: an object, such as samples on their way, in a decoded result of an action."""

    number: int


class Encoder:
    """Writes values one after another. Keeps the numbers of objects for as long as these live. Owned by one thread."""

    def __init__(self, types: Sequence[ValueType], *, secrets: bool) -> None:
        """secrets: whether values are written as they are, whatever ValueType.secret says."""
        self._types = {
            one.type: (
                number,
                one.shared,
                tuple(
                    (name, f"{one.type.__name__}.{name}", None if secrets else one.secret.get(name))
                    for name in one.fields
                ),
            )
            for number, one in enumerate(types)
        }
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id()
        self._next = 0
        self._gone: deque[int] = deque()
        self._puts: dict[type, Callable[[Any, str], None]] = {
            type(None): lambda _value, _where: self._out.append(Tag.NONE),
            bool: lambda value, _where: self._out.append(Tag.TRUE if value else Tag.FALSE),
            int: self._int,
            float: self._float,
            bytes: self._bytes,
            str: self._str,
            tuple: self._tuple,
            list: lambda value, where: self._many(Tag.LIST, value, where),
            frozenset: lambda value, where: self._many(Tag.SET, sorted(value), where),
            dict: self._dict,
            np.ndarray: self._array,
        }
        self._out = bytearray()

    def encode(self, value: object, where: str) -> bytes:
        """where: what it is, for NotAValue, which names the type and the field that cannot be written."""
        self._out = bytearray()
        self._put(value, where)
        return bytes(self._out)

    def number(self, thing: object) -> int:
        """Gives an object that has no value a number, by which later values name it."""
        number, key = self._next, id(thing)
        self._next += 1

        def gone(_: weakref.ref[Any]) -> None:  # from any thread
            del self._numbers[key]
            self._gone.append(number)

        self._numbers[key] = weakref.ref(thing, gone), number
        return number

    def gone(self) -> tuple[int, ...]:
        """Returns the numbers of objects that have ended since the last call."""
        return tuple(self._gone.popleft() for _ in range(len(self._gone)))

    def _put(self, value: Any, where: str) -> None:
        put = self._puts.get(type(value))
        if put is not None:
            put(value, where)
        elif type(value) in self._types:
            self._record(value, where)
        elif (known := self._numbers.get(id(value))) is not None:
            self._out.append(Tag.KNOWN)
            self._varint(known[1])
        elif isinstance(value, np.generic):
            self._put(value.item(), where)
        elif isinstance(value, Mapping):
            self._dict(value, where)
        elif isinstance(value, int | str):  # an enum's member
            self._put(int(value) if isinstance(value, int) else str(value), where)
        else:
            raise NotAValue(f"{where} is a {type(value).__name__}; it must be a number, text, array or registered type")

    def _varint(self, value: int) -> None:
        while value > 0x7F:
            self._out.append(value & 0x7F | 0x80)
            value >>= 7
        self._out.append(value)

    def _int(self, value: int, where: str) -> None:
        if not -(2**64) <= value < 2**64:
            raise NotAValue(f"{where} is {value}; an int must have at most 64 bits and a sign")
        self._out.append(Tag.INT)
        self._varint(2 * value if value >= 0 else -2 * value - 1)

    def _float(self, value: float, _where: str) -> None:
        self._out.append(Tag.FLOAT)
        self._out += FLOAT.pack(value)

    def _bytes(self, value: bytes, _where: str, tag: Tag = Tag.BYTES) -> None:
        self._out.append(tag)
        self._varint(len(value))
        self._out += value

    def _str(self, value: str, where: str) -> None:
        self._bytes(value.encode(), where, Tag.STR)

    def _tuple(self, value: tuple[Any, ...], where: str) -> None:
        if len(value) >= LONG and set(map(type, value)) == {int} and -(2**63) <= min(value) <= max(value) < 2**63:
            self._out.append(Tag.INTS)
            self._varint(len(value))
            self._out += np.array(value, "<i8").tobytes()
        else:
            self._many(Tag.TUPLE, value, where)

    def _many(self, tag: Tag, values: Sequence[Any], where: str) -> None:
        self._out.append(tag)
        self._varint(len(values))
        for value in values:
            self._put(value, where)

    def _dict(self, value: Mapping[Any, Any], where: str) -> None:
        self._many(Tag.DICT, [part for pair in value.items() for part in pair], where)

    def _array(self, value: np.ndarray, where: str) -> None:
        if value.dtype == np.object_ and value.ndim == 1:
            self._many(Tag.OBJECTS, value.tolist(), where)
            return
        dtype = DTYPE_NUMBERS.get(value.dtype)
        if dtype is None:
            raise NotAValue(
                f"{where} is an array of {value.dtype}; its dtype must be one of {', '.join(map(str, DTYPES))}"
            )
        self._out.append(Tag.ARRAY)
        for number in (dtype, value.ndim, *value.shape):
            self._varint(number)
        self._out += value.tobytes()

    def _record(self, value: Any, where: str) -> None:
        number, shared, names = self._types[type(value)]
        if shared:
            known = self._numbers.get(id(value))
            self._out.append(Tag.SHARED if known is None else Tag.KNOWN)
            self._varint(self.number(value) if known is None else known[1])
            if known is not None:
                return
        else:
            self._out.append(Tag.RECORD)
        self._varint(number)
        for name, full_name, hide in names:
            field = getattr(value, name)
            self._put(field if hide is None else hide(field), full_name)


class Decoder:
    """Reads what one Encoder has written, in the same order. BadRecord for anything that it cannot have written."""

    def __init__(self, types: Sequence[ValueType]) -> None:
        self._types = [(one.type, len(one.fields)) for one in types]
        self.known: dict[int, object] = {}  # by number; the caller adds what a result's Known stand for
        self._data = memoryview(b"")
        self._at = 0

    def decode(self, data: bytes) -> Any:
        """The value that takes up all of `data`. An object of `known` is itself, one that is not there a Known."""
        self._data, self._at = memoryview(data), 0
        try:
            value = self._value(0)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise error if isinstance(error, BadRecord) else BadRecord(f"a value cannot be read: {error}") from error
        if self._at != len(data):
            raise BadRecord(f"{len(data) - self._at} bytes follow a value; none may")
        return value

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.known.pop(number, None)

    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise BadRecord(f"a value needs {size} bytes at {self._at}; there are {len(self._data)}")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise BadRecord("a varint has more than 10 bytes")

    def _count(self) -> int:
        """Reads a count of parts, each of which takes up at least a byte."""
        count = self._varint()
        if count > len(self._data) - self._at:
            raise BadRecord(f"{count} parts are announced; {len(self._data) - self._at} bytes are left")
        return count

    def _value(self, depth: int) -> Any:
        if depth > MOST_NESTED:
            raise BadRecord(f"values are nested more than {MOST_NESTED} deep")
        match self._take(1)[0]:
            case Tag.NONE:
                return None
            case Tag.FALSE:
                return False
            case Tag.TRUE:
                return True
            case Tag.INT:
                zigzag = self._varint()
                return zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1 >> 1)
            case Tag.FLOAT:
                return FLOAT.unpack(self._take(8))[0]
            case Tag.BYTES:
                return bytes(self._take(self._count()))
            case Tag.STR:
                return bytes(self._take(self._count())).decode()
            case Tag.ARRAY:
                return self._array()
            case Tag.INTS:
                return tuple(np.frombuffer(self._take(8 * self._count()), "<i8").tolist())
            case tag:
                return self._compound(tag, depth + 1)

    def _compound(self, tag: int, depth: int) -> Any:
        match tag:
            case Tag.SHARED:
                number = self._varint()
                self.known[number] = value = self._record(depth)
                return value
            case Tag.KNOWN:
                number = self._varint()
                return self.known.get(number, Known(number))
            case Tag.RECORD:
                return self._record(depth)
        values = [self._value(depth) for _ in range(self._count())]
        match tag:
            case Tag.LIST:
                return values
            case Tag.TUPLE:
                return tuple(values)
            case Tag.SET:
                return frozenset(values)
            case Tag.DICT:
                return dict(zip(values[::2], values[1::2], strict=True))
            case Tag.OBJECTS:
                array = np.empty(len(values), np.object_)
                array[:] = values
                return array
        raise BadRecord(f"a value begins with tag {tag}; tags are 0 … {max(Tag)}")

    def _array(self) -> np.ndarray:
        number, ndim = self._varint(), self._varint()
        if number >= len(DTYPES) or ndim > 8:
            raise BadRecord(f"an array has dtype {number} and {ndim} dimensions")
        shape, size = [self._varint() for _ in range(ndim)], DTYPES[number].itemsize
        for length in shape:
            size *= length
        return np.frombuffer(self._take(size), DTYPES[number]).reshape(shape).copy()

    def _record(self, depth: int) -> Any:
        number = self._varint()
        if number >= len(self._types):
            raise BadRecord(f"a record is of type {number}; there are {len(self._types)}")
        made, count = self._types[number]
        return made(*[self._value(depth) for _ in range(count)])
