"""Calls whose arguments are JSON: objects with name and arguments, lists of them, and names before arguments."""

from tandem.cluster.text.parsers.calls import (
    Schemas,
    is_object,
    name_before,
    offered,
    read_arguments,
    text_before,
    whole_call,
)
from tandem.cluster.text.parsers.parts import ParsedParts
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting, nowhere

CALLS = "<｜tool▁calls▁begin｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_NAME = "<｜tool▁sep｜>"
CALL_END = "<｜tool▁call▁end｜>"
CALLS_END = "<｜tool▁calls▁end｜>"


def call_of_object(source: Source, parts: ParsedParts, schemas: Schemas, *, strict: bool = False) -> Waiting[None]:
    """Reads a JSON object with name, and arguments or parameters. These stream if the name comes first. strict: it must
    have arguments; else a name alone is a call without any."""
    yield from source.need("{")
    name, early, begun = "", "", False
    while True:
        yield from source.spaces()
        key = yield from source.string()
        yield from source.need(":")
        if key == "name":
            name = offered((yield from source.string()), schemas)
        elif key in ("arguments", "parameters") and name and not begun:
            begun = True
            yield from _arguments(source, parts, name)
        elif key in ("arguments", "parameters"):
            early = yield from _kept_arguments(source)
        else:
            yield from source.value(nowhere)
        yield from source.spaces()
        end = yield from source.starts(",", "}")
        if end is None:
            raise Malformed("}")
        if end == "}":
            break
    if begun:
        source.remember()
    elif early or not strict:
        whole_call(source, parts, offered(name, schemas), early or "{}")
    else:
        raise Malformed("arguments")


def calls_of_list(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads a JSON list of calls."""
    yield from source.need("[")
    yield from source.spaces()
    if (yield from source.starts("]")):
        return
    while True:
        yield from call_of_object(source, parts, schemas)
        yield from source.spaces()
        if (yield from source.starts(",", "]")) != ",":
            source.remember()
            return


def list_or_named(source: Source, parts: ParsedParts, schemas: Schemas, mark: str) -> Waiting[None]:
    """Reads a list of calls, or a call's name, perhaps marks of Mistral's, and its arguments."""
    yield from source.spaces()
    if (yield from source.peek()) == "[":
        yield from calls_of_list(source, parts, schemas)
        return
    name = offered((yield from name_before(source, "{[")), schemas)
    mark_of_name = yield from source.starts("[ARGS]", "[CALL_ID]")
    if mark_of_name == "[CALL_ID]":
        yield from source.upto(("[ARGS]",), nowhere)
    yield from read_arguments(source, parts, name)


def deepseek_call(source: Source, parts: ParsedParts, schemas: Schemas, mark: str) -> Waiting[None]:
    """Reads function<sep>NAME and a block of JSON (V3, R1), or NAME<sep> and JSON (V3.1)."""
    if mark == CALLS:
        yield from source.need(CALL)
    name = yield from text_before(source, CALL_NAME)
    yield from source.spaces()
    if (yield from source.peek()) != "{":
        name = yield from text_before(source, "\n")
        yield from source.need("```json")
    yield from read_arguments(source, parts, offered(name, schemas))
    yield from source.upto((CALL_END, CALLS_END), nowhere)


def _arguments(source: Source, parts: ParsedParts, name: str) -> Waiting[None]:
    """Reads an object, or the text of one as a JSON string."""
    yield from source.spaces()
    if (yield from source.peek()) == '"':
        whole_call(source, parts, name, (yield from _kept_arguments(source)))
    else:
        yield from read_arguments(source, parts, name)


def _kept_arguments(source: Source) -> Waiting[str]:
    """Reads arguments as _arguments() does, but keeps them, because the name is still to come."""
    yield from source.spaces()
    if (yield from source.peek()) == '"':
        text = (yield from source.string()) or "{}"
    else:
        kept: list[str] = []
        yield from source.value(kept.append)
        text = "".join(kept)
    if not is_object(text):
        raise Malformed("{")
    return text
