"""The common parts of all formats of tool calls: a call's begin and end, and text that turns out to be no call."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tandem.cluster.text.parsers.parts import ParsedParts
from tandem.cluster.text.parsers.source import Malformed, Sink, Source, Waiting

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool that the request offers, by the tool's name."""

CallParser = Callable[[Source, ParsedParts, Schemas, str], Waiting[None]]
"""Reads one or more calls after the mark that opens them. Malformed if there is none."""

NAME_LENGTH = 256


def offered(name: str, schemas: Schemas) -> str:
    """Returns the name if the request offers this tool. Malformed for another: the text only looks like a call."""
    name = name.strip()
    if name not in schemas:
        raise Malformed("name")
    return name


def read_arguments(source: Source, parts: ParsedParts, name: str) -> Waiting[None]:
    """Reads a call whose arguments, a JSON object, stream as they come. Malformed, and no call, if they are none."""
    yield from source.spaces()
    if (yield from source.peek()) != "{":
        raise Malformed("{")
    parts.call(name)
    yield from source.value(parts.arguments)
    end_call(source, parts)


def whole_call(source: Source, parts: ParsedParts, name: str, arguments: str) -> None:
    """Adds a call whose arguments come at once."""
    parts.call(name)
    parts.arguments(arguments)
    end_call(source, parts)


def end_call(source: Source, parts: ParsedParts) -> None:
    """Ends a call whose arguments are whole. Text from here on is content unless it is another call."""
    parts.end_call()
    source.remember()


def attempt(source: Source, parts: ParsedParts, mark: str, call: Waiting[None], otherwise: Sink) -> Waiting[bool]:
    """Returns whether a call could be read after the mark. Text that was no part of a call goes to `otherwise`, with
    the mark if there was no call at all. A call that breaks off has the arguments that came."""
    source.remember()
    before = parts.num_calls
    try:
        yield from call
    except Malformed:
        text = source.forget()
        if parts.in_call:
            parts.end_call()
        elif parts.num_calls > before:
            parts.content(text)
        else:
            otherwise(mark + text)
    else:
        source.forget()
    return parts.num_calls > before


def name_before(source: Source, ends: str) -> Waiting[str]:
    """Reads the text before one of these characters, which stays. Malformed if none comes within NAME_LENGTH."""
    name: list[str] = []
    while (first := (yield from source.peek())) and first not in ends and len(name) < NAME_LENGTH:
        name.append(first)
        yield from source.starts(first)
    if not first or first not in ends:
        raise Malformed(ends)
    return "".join(name)


def text_before(source: Source, mark: str) -> Waiting[str]:
    """Reads the text before a mark, which must come."""
    kept: list[str] = []
    if (yield from source.upto((mark,), kept.append)) is None:
        raise Malformed(mark)
    return "".join(kept)


def is_object(text: str) -> bool:
    """Returns whether the text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
