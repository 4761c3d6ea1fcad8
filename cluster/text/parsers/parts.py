"""The parts of an answer, in the order in which a model writes them."""

import secrets
import string
from dataclasses import dataclass, replace
from itertools import groupby

ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Reasoning:
    """A piece of the text in which the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the model's answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. Its arguments come in the CallArguments after it."""

    index: int  # of the call in this answer
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments' JSON text of the latest call."""

    index: int
    text: str


ParsedPart = Reasoning | Content | CallBegin | CallArguments


def _kind(part: ParsedPart) -> tuple[str, int]:
    return type(part).__name__, part.index if isinstance(part, CallArguments) else 0


class Spaces:
    """Holds back the spaces at the end of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held: list[str] = []  # there may be very many

    def before(self, text: str) -> str:
        """Returns the text so far, without earlier returns and the spaces at its end."""
        kept = text.rstrip()
        end = text[len(kept) :]
        if kept:
            kept = self.take() + kept
        if end:
            self._held.append(end)
        return kept

    def take(self) -> str:
        """Returns all held spaces, and holds none."""
        taken = "".join(self._held)
        self._held.clear()
        return taken


class ParsedParts:
    """Collects what a parser finds until take() is called."""

    def __init__(self, *, most_calls: int | None = None, id_length: int = 24, keep_spaces: bool = False) -> None:
        """most_calls: further calls are left out. id_length: characters of a call's id. keep_spaces: keeps spaces at
        the end of a text even if a call follows; otherwise they are no content then."""
        self._most_calls = most_calls
        self._id_length = id_length
        self._keep_spaces = keep_spaces
        self._parts: list[ParsedPart] = []
        self._spaces = Spaces()  # behind the content so far
        self.num_calls = 0
        self.in_call = False  # more arguments may come

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def content(self, text: str) -> None:
        """Adds content. Spaces wait for more content: those around tool calls are dropped."""
        kept = text if self._keep_spaces else self._spaces.before(text)
        if kept:
            self._parts.append(Content(kept))

    def drop_spaces(self) -> None:
        """Drops the spaces that wait for more content."""
        self._spaces.take()

    def call(self, name: str) -> None:
        """Begins a tool call."""
        self.drop_spaces()
        if not self._left_out:
            prefix = "call_" if self._id_length > 9 else ""
            call_id = prefix + "".join(secrets.choice(ALPHABET) for _ in range(self._id_length))
            self._parts.append(CallBegin(self.num_calls, call_id, name))
        self.num_calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the latest call."""
        if text and not self._most_calls_exceeded:
            self._parts.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Ends the latest call: it has all its arguments."""
        self.in_call = False

    def finish(self) -> None:
        """Ends the answer. Spaces at the end are content if there is no call."""
        spaces = self._spaces.take()
        if spaces and not self.num_calls:
            self._parts.append(Content(spaces))

    def take(self) -> list[ParsedPart]:
        """Returns the parts since the last call. No two neighbours are of one kind, but for calls."""
        found, self._parts = self._parts, []
        parts: list[ParsedPart] = []
        for _, alike in groupby(found, key=_kind):
            first, *more = alike
            if isinstance(first, CallBegin) or not more:
                parts += [first, *more]
            else:
                text = "".join(one.text for one in (first, *more) if not isinstance(one, CallBegin))
                parts.append(replace(first, text=text))
        return parts

    @property
    def _left_out(self) -> bool:
        return self._most_calls is not None and self.num_calls >= self._most_calls

    @property
    def _most_calls_exceeded(self) -> bool:
        return self._most_calls is not None and self.num_calls > self._most_calls
