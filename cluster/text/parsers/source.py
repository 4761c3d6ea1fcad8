"""The text of an answer as it comes, for parsers that are written as if all of it were there.

Each method that may have to wait for more text is a generator: a parser calls it with `yield from`. Parsers are run by
OutputParser.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]
Sink = Callable[[str], None]

SPACES = re.compile(r"\s*")
PLAIN = re.compile(r'[^"{}\[\]]*')
NUMBER_END = re.compile(r"[,}\]\s]")


class Malformed(ValueError):
    """The text is no call of the parser's format."""


def nowhere(text: str) -> None:
    """A sink for text that nobody needs."""


class Source:
    """The text that has come and has not been read. Owned by one parser."""

    def __init__(self) -> None:
        self._text = ""
        self._offset = 0
        self._since: list[str] | None = None
        self.ended = False
        self.cut = False  # max_tokens has ended it

    def push(self, text: str) -> None:
        """Adds text that has come."""
        self._text = self._text[self._offset :] + text
        self._offset = 0

    def remember(self) -> None:
        """Starts keeping what is read, for forget()."""
        self._since = []

    def forget(self) -> str:
        """Returns the text that was read since remember()."""
        kept, self._since = "".join(self._since or ()), None
        return kept

    def upto(self, marks: Sequence[str], sink: Sink) -> Waiting[str | None]:
        """Gives the text before the first of the marks to the sink as it comes, then reads and returns the mark. None
        at the end of the text."""
        while True:
            found = [(offset, mark) for mark in marks if (offset := self._text.find(mark, self._offset)) >= 0]
            if found:
                offset, mark = min(found)
                sink(self._read(offset - self._offset))
                self._read(len(mark))
                return mark
            left = len(self._text) - self._offset
            held = 0 if self.ended else _begun(self._text, left, marks)
            if left > held:
                sink(self._read(left - held))
            if self.ended:
                return None
            yield

    def spaces(self, sink: Sink = nowhere) -> Waiting[None]:
        """Reads spaces and line ends."""
        while True:
            found = SPACES.match(self._text, self._offset)
            sink(self._read(found.end() - self._offset if found else 0))
            if self._is_there or self.ended:
                return
            yield

    def sees(self, *marks: str) -> Waiting[str | None]:
        """Returns the mark with which the text goes on, and leaves it unread. None if there is no mark here."""
        while True:
            for mark in marks:
                if self._text.startswith(mark, self._offset):
                    return mark
            rest = self._text[self._offset : self._offset + max(map(len, marks))]
            if self.ended or not any(mark.startswith(rest) for mark in marks):
                return None
            yield

    def starts(self, *marks: str) -> Waiting[str | None]:
        """Reads and returns the mark with which the text goes on. None if there is no mark here."""
        mark = yield from self.sees(*marks)
        self._read(len(mark or ""))
        return mark

    def ends(self, *marks: str) -> bool:
        """Returns whether the text ends here, or in the begin of a mark, which is then read. Call it after sees() or
        peek()."""
        rest = self._text[self._offset : self._offset + max(map(len, marks), default=1)]
        ends = self.ended and (not rest or any(mark.startswith(rest) for mark in marks))
        self._read(len(rest) if ends else 0)
        return ends

    def peek(self) -> Waiting[str]:
        """Returns the next character, and leaves it unread. Empty at the end."""
        while not self._is_there and not self.ended:
            yield
        return self._text[self._offset : self._offset + 1]

    def need(self, mark: str) -> Waiting[None]:
        """Reads the mark, and spaces before it. Malformed if something else comes."""
        yield from self.spaces()
        if (yield from self.starts(mark)) is None:
            raise Malformed(mark)

    def string(self) -> Waiting[str]:
        """Reads a JSON string, and returns its value. Malformed for anything else."""
        raw: list[str] = []
        yield from self.value(raw.append)
        try:
            value = json.loads("".join(raw))
        except ValueError:
            raise Malformed("string") from None
        if not isinstance(value, str):
            raise Malformed("string")
        return value

    def value(self, sink: Sink) -> Waiting[None]:
        """Gives the text of one JSON value to the sink as it comes. Malformed if it is none, or breaks off. Within it
        only strings and brackets are looked at."""
        yield from self.spaces()
        first = yield from self.peek()
        if first == '"':
            yield from self._string(sink)
        elif first and first in "{[":
            yield from self._nested(sink)
        else:
            yield from self._word(sink)

    def _word(self, sink: Sink) -> Waiting[None]:
        """Reads a number, true, false or null."""
        word: list[str] = []
        while True:
            found = NUMBER_END.search(self._text, self._offset)
            word.append(self._read((found.start() if found else len(self._text)) - self._offset))
            if found or self.ended:
                break
            yield
        text = "".join(word)
        try:
            json.loads(text)
        except ValueError:
            raise Malformed("value") from None
        sink(text)

    def _nested(self, sink: Sink) -> Waiting[None]:
        """Reads an object or a list."""
        open_brackets: list[str] = []
        while True:
            found = PLAIN.match(self._text, self._offset)
            sink(self._read(found.end() - self._offset if found else 0))
            mark = yield from self.peek()
            if mark == "":
                raise Malformed("broken off")
            if mark == '"':
                yield from self._string(sink)
            elif mark in "{[":
                sink(self._read(1))
                open_brackets.append("}" if mark == "{" else "]")
            elif mark in "}]":
                sink(self._read(1))
                if open_brackets.pop() != mark:
                    raise Malformed(mark)
                if not open_brackets:
                    return

    def _string(self, sink: Sink) -> Waiting[None]:
        sink(self._read(1))
        while True:
            offset = self._offset
            while offset < len(self._text) and self._text[offset] != '"':
                offset += 2 if self._text[offset] == "\\" else 1
            whole = min(offset, len(self._text))
            if offset > len(self._text):
                whole = len(self._text) - 1  # a backslash whose character has not come
            sink(self._read(whole - self._offset))
            if self._text.startswith('"', self._offset):
                sink(self._read(1))
                return
            if self.ended:
                raise Malformed("broken off")
            yield

    @property
    def _is_there(self) -> bool:
        """Returns whether there is text that has not been read."""
        return self._offset < len(self._text)

    def _read(self, count: int) -> str:
        text = self._text[self._offset : self._offset + count]
        self._offset += len(text)
        if self._since is not None:
            self._since.append(text)
        return text


def _begun(text: str, most: int, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of the text, at most so many, may begin a mark."""
    return max(
        (size for mark in marks for size in range(1, min(len(mark), most + 1)) if text.endswith(mark[:size])),
        default=0,
    )
