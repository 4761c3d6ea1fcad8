"""SlotRuns as bytes. Long runs cost a few bytes; single pages cost the bits that tell them apart.

    message  version | GAPS?                    1 byte
             num_runs                           varint
             first run: begin + 1, length       2 varints, when num_runs >= 1
             last run:  begin + 1, length       2 varints, when num_runs >= 2
             lengths of the runs between        column, when num_runs >= 3
             begins (or gaps) of those          column, when num_runs >= 3
    column   width | PATCHED?                   1 byte, width 0 … 32
             base (zigzag), unit                2 varints
             k of each value                    width bits each, little end first, padded with zeros to a byte
             num_patches; columns of the indices and of the high parts of k, when PATCHED

A value is base + unit·k. The first and the last run stand apart for they may cover parts of pages, which would spoil
the unit. A gap is the distance from the end of the run before: narrower than begins when the pages are sorted. Frame of
reference with a common unit and patched outliers: Zukowski et al., "Super-Scalar RAM-CPU Cache Compression" (2006).
"""

from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.position_map import SlotRuns
from tandem.transfer.errors import InvalidPositionMap

VERSION = 1
GAPS = 0x80
PATCHED = 0x80
MAX_WIDTH = 32
MAX_SLOT = 2**31 - 1
VALUE_LIMIT = 2**34  # no honest begin, length or gap is larger in magnitude


def encode_runs(runs: SlotRuns) -> bytes:
    """The wire form of `runs`. InvalidPositionMap when a run ends above the largest int32."""
    count = runs.begins.size
    head = _varint(count)
    for index in (0, -1)[:count]:
        begin, length = int(runs.begins[index]), int(runs.lengths[index])
        _check_end(begin + length)
        head += _varint(begin + 1) + _varint(length)
    if count <= 2:
        return bytes((VERSION,)) + head
    begins, lengths = runs.begins.astype(np.int64), runs.lengths.astype(np.int64)
    ends = begins + lengths
    _check_end(int(ends.max()))
    absolute = _encode_column(begins[1:-1])
    gaps = _encode_column((begins[1:] - ends[:-1])[:-1])
    flags, column = (VERSION | GAPS, gaps) if len(gaps) < len(absolute) else (VERSION, absolute)
    return bytes((flags,)) + head + _encode_column(lengths[1:-1]) + column


def decode_runs(data: bytes, *, max_tokens: int) -> SlotRuns:
    """Inverse of encode_runs. Time and memory are bounded by len(data) and max_tokens, whatever data claims.

    Raises InvalidPositionMap for anything that encode_runs cannot have written, and for more than max_tokens positions.
    """
    reader = _Reader(data)
    flags = reader.byte("version")
    if flags & ~GAPS != VERSION:
        raise InvalidPositionMap(f"version is {flags & ~GAPS}; {VERSION} is understood")
    count = reader.varint("num_runs")
    if count > max_tokens:
        raise InvalidPositionMap(f"num_runs is {count}; at most {max_tokens} positions are expected")
    begins, lengths = np.empty(count, np.int32), np.empty(count, np.int32)
    for index in (0, -1)[:count]:
        begins[index], lengths[index] = reader.run()
    if count > 2:
        between = _decode_column(reader, count - 2)
        column = _decode_column(reader, count - 2)
        if flags & GAPS:
            column = int(begins[0]) + int(lengths[0]) + np.cumsum(column + between) - between
        _check_slots(column, between)
        begins[1:-1], lengths[1:-1] = column, between
    elif flags & GAPS:
        raise InvalidPositionMap(f"the gaps flag is set with {count} runs; it needs at least 3")
    reader.finish()
    runs = SlotRuns(begins, lengths)
    if runs.num_tokens > max_tokens:
        raise InvalidPositionMap(f"runs hold {runs.num_tokens} positions; at most {max_tokens} are expected")
    return runs


def _check_slots(begins: Int64Array, lengths: Int64Array) -> None:
    """Checks that these values, at least one, suit SlotRuns, which holds int32."""
    first, shortest, longest = int(begins.min()), int(lengths.min()), int(lengths.max())
    if first < -1:
        raise InvalidPositionMap(f"a run begins at {first}; slots are at least 0, or -1 to skip")
    if shortest < 1 or longest > MAX_SLOT:
        raise InvalidPositionMap(f"lengths are {shortest} … {longest}; they must be from 1 to {MAX_SLOT}")
    _check_end(int((begins + lengths).max()))


def _check_end(end: int) -> None:
    if end - 1 > MAX_SLOT:
        raise InvalidPositionMap(f"a run ends at slot {end - 1}; the largest slot is {MAX_SLOT}")


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _encode_column(values: Int64Array, patches: bool = True) -> bytes:
    base = int(values.min())
    k = values - base
    unit = int(np.gcd.reduce(k)) or 1
    k //= unit
    width = _best_width(k) if patches else int(k.max()).bit_length()
    zigzag = 2 * base if base >= 0 else -2 * base - 1
    outliers = np.flatnonzero(k >> width)
    head = bytes((width | (PATCHED if outliers.size else 0),)) + _varint(zigzag) + _varint(unit)
    result = head + _pack_bits(k, width)
    if outliers.size:
        result += _varint(outliers.size)
        result += _encode_column(outliers, patches=False) + _encode_column(k[outliers] >> width, patches=False)
    return result


def _best_width(k: Int64Array) -> int:
    """The width that makes the column shortest, values that do not fit being patched."""
    bits = np.frexp(k.astype(np.float64))[1]  # bit lengths, exact below 2**53
    widest = int(bits.max())
    widths = np.arange(min(widest, MAX_WIDTH) + 1)
    outliers = k.size - np.cumsum(np.bincount(bits, minlength=widest + 1))[: widths.size]
    patch_bits = k.size.bit_length() + widest - widths
    cost = widths * k.size + outliers * patch_bits + np.where(outliers > 0, 64, 0)
    return int(widths[np.argmin(cost)])


def _pack_bits(k: Int64Array, width: int) -> bytes:
    low = (k & ((1 << width) - 1)).astype("<u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(low, axis=1, count=width, bitorder="little")
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def _unpack_bits(data: bytes, count: int, width: int) -> Int64Array:
    """Unpacks int64 [count] from exactly ceil(count · width / 8) bytes."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[count * width :].any():
        raise InvalidPositionMap("the padding of a column is not zero")
    padded = np.zeros((count, 32), np.uint8)
    padded[:, :width] = bits[: count * width].reshape(count, width)
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").reshape(count).astype(np.int64)


def _decode_column(reader: "_Reader", count: int, patches: bool = True) -> Int64Array:
    head = reader.byte("column")
    width, patched = head & ~PATCHED, bool(head & PATCHED)
    if width > MAX_WIDTH or (patched and not patches):
        raise InvalidPositionMap(
            f"a column begins with byte {head}; widths are 0 … {MAX_WIDTH}, patches are not nested"
        )
    zigzag, unit = reader.varint("base"), reader.varint("unit")
    base = zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1 >> 1)
    packed = reader.take((count * width + 7) // 8, "column")
    k = _unpack_bits(packed, count, width) if width else np.zeros(count, np.int64)
    if patched:
        num_patches = reader.varint("num_patches")
        if not 1 <= num_patches <= count:
            raise InvalidPositionMap(f"num_patches is {num_patches}; it must be from 1 to {count}")
        where = _decode_column(reader, num_patches, patches=False)
        high = _decode_column(reader, num_patches, patches=False)
        if where[0] < 0 or where[-1] >= count or np.any(np.diff(where) < 1):
            raise InvalidPositionMap(f"patches are not at ascending indices below {count}")
        if int(high.min()) < 1 or int(high.max()) << width > VALUE_LIMIT:
            raise InvalidPositionMap(
                f"patches are {int(high.min())} … {int(high.max())}; with width {width} that is out of range"
            )
        k[where] |= high << width
    if unit < 1 or abs(base) > VALUE_LIMIT or base + unit * int(k.max()) > VALUE_LIMIT:
        raise InvalidPositionMap(
            f"a column reaches from {base} to {base + unit * int(k.max())}; it must stay within ±{VALUE_LIMIT}"
        )
    return base + unit * k


@dataclass
class _Reader:
    data: bytes
    offset: int = 0

    def take(self, size: int, field: str) -> bytes:
        end = self.offset + size
        if end > len(self.data):
            raise InvalidPositionMap(f"{field} needs {size} bytes at {self.offset}; the map has {len(self.data)} bytes")
        result = self.data[self.offset : end]
        self.offset = end
        return result

    def byte(self, field: str) -> int:
        return self.take(1, field)[0]

    def varint(self, field: str) -> int:
        """Reads a varint of at most 6 bytes (42 bits), in the shortest form."""
        value = 0
        for shift in range(0, 42, 7):
            byte = self.byte(field)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and shift:
                    raise InvalidPositionMap(f"{field} is a varint in overlong form")
                return value
        raise InvalidPositionMap(f"{field} is a varint of more than 6 bytes")

    def run(self) -> tuple[int, int]:
        """Reads and checks begin and length of a run that stands apart."""
        begin, length = self.varint("begin") - 1, self.varint("length")
        if not 1 <= length <= MAX_SLOT:
            raise InvalidPositionMap(f"a length is {length}; it must be from 1 to {MAX_SLOT}")
        _check_end(begin + length)
        return begin, length

    def finish(self) -> None:
        if self.offset != len(self.data):
            raise InvalidPositionMap(f"{len(self.data) - self.offset} bytes follow the map; none may")
