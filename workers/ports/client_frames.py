"""Reads an HTTP/2 client's bytes, frame by frame (RFC 9113, section 4.1). Payloads are passed on unread."""

from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9  # of a frame: 3 for its length, then type, flags, and 4 for its stream
DATA, HEADERS, RST_STREAM = 0, 1, 3
SMALL_DATA = 64  # bytes; frames with less cost more to read than they bring


class NotHttp2(Exception):
    """A client speaks another protocol."""


@dataclass
class Passed:
    """Bytes to send on, and what is in them. blocked: another frame is there, which begins a call."""

    content: bytes = b""
    calls: int = 0
    resets: int = 0
    small: int = 0  # frames that carry next to nothing, resets included
    blocked: bool = False
    more: bool = False


class ClientFrames:
    """Holds bytes from add() until take() passes them on, in their order."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._rest = 0  # bytes of the frame under way that have not come
        self._preface = True
        self._last_stream = 0

    @property
    def begun(self) -> bool:
        """Whether the client has said that it speaks HTTP/2."""
        return not self._preface

    @property
    def held(self) -> int:
        """The bytes held."""
        return len(self._held)

    def add(self, content: bytes) -> None:
        """Raises NotHttp2 where the client's first bytes are not HTTP/2."""
        self._held += content
        if self._preface:
            if not PREFACE.startswith(self._held[: len(PREFACE)]):
                raise NotHttp2
            if len(self._held) >= len(PREFACE):
                self._preface = False
                self._rest = len(PREFACE)

    def take(self, frames: int, calls: int) -> Passed:
        """Passes on at most so many frames, and new calls among them. Part of a frame's payload may go ahead of the
        rest."""
        passed, held, at, end = Passed(), self._held, 0, len(self._held)
        if self._preface:
            return passed
        while True:
            step = min(self._rest, end - at)
            at += step
            self._rest -= step
            if self._rest or end - at < HEAD_BYTES:
                break
            if not frames:
                passed.more = True
                break
            length, kind = int.from_bytes(held[at : at + 3], "big"), held[at + 3]
            if kind == HEADERS:
                stream = int.from_bytes(held[at + 5 : at + HEAD_BYTES], "big") & 0x7FFFFFFF
                if stream > self._last_stream:
                    if passed.calls == calls:
                        passed.blocked = True
                        break
                    passed.calls += 1
                    self._last_stream = stream
            elif kind != DATA or length < SMALL_DATA:
                passed.small += 1
                passed.resets += kind == RST_STREAM
            frames -= 1
            at += HEAD_BYTES
            self._rest = length
        passed.content = bytes(held[:at])
        del held[:at]
        return passed
