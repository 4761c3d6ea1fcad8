"""Formats in which models write tool calls: the begin of a call, and its parser, for each format.

A parser is a generator over a Source, which gives what it finds to ParsedParts. A call names a tool that the request
offers, and its arguments are a JSON object. Text that turns out to be no call is content.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.cluster.text.parsers.calls import CallParser, Schemas, attempt
from tandem.cluster.text.parsers.json_calls import (
    CALL,
    CALL_END,
    CALL_NAME,
    CALLS,
    CALLS_END,
    call_of_object,
    deepseek_call,
    list_or_named,
)
from tandem.cluster.text.parsers.parts import ParsedParts
from tandem.cluster.text.parsers.python_calls import pythonic
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting
from tandem.cluster.text.parsers.xml_calls import FUNCTION, TOOL, TOOL_END, function_call, pairs_call

PYTHON_TAG = "<|python_tag|>"


def tagged_call(source: Source, parts: ParsedParts, schemas: Schemas, mark: str) -> Waiting[None]:
    """Reads <tool_call> … </tool_call> around JSON (Hermes, Qwen), or around XML (Qwen3-Coder, GLM). Qwen3-Coder may
    leave the opener out."""
    if mark == FUNCTION:
        yield from function_call(source, parts, schemas)
        return
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        yield from call_of_object(source, parts, schemas)
        yield from source.need(TOOL_END)
    elif (yield from source.starts(FUNCTION)) is not None:
        yield from function_call(source, parts, schemas)
    else:
        yield from pairs_call(source, parts, schemas)


def json_at_start(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads one JSON object for each call, or several with semicolons between them, which is the whole answer (Llama
    3)."""
    before: list[str] = []
    yield from source.spaces(before.append)
    tag = yield from source.starts(PYTHON_TAG)
    if tag is not None:
        yield from source.spaces()
    while (yield from source.peek()) == "{":
        call = call_of_object(source, parts, schemas, strict=True)
        if not (yield from attempt(source, parts, "".join(before), call, parts.content)):
            return
        before.clear()
        yield from source.spaces(before.append)
        semicolon = yield from source.starts(";")
        before += [] if semicolon is None else [semicolon]
        yield from source.spaces(before.append)
    parts.content("".join(before))


def _nothing(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads nothing at the start: calls may begin anywhere."""
    yield from ()


def _no_call(source: Source, parts: ParsedParts, schemas: Schemas, mark: str) -> Waiting[None]:
    """Reads no call: there are no openers."""
    yield from ()
    raise Malformed(mark)


@dataclass(frozen=True)
class ToolFormat:
    """The format in which one kind of model writes calls."""

    openers: tuple[str, ...] = ()  # texts that begin a call, wherever they stand
    call: CallParser = _no_call  # reads it
    closers: tuple[str, ...] = ()  # texts that are dropped after a call
    start: Callable[[Source, ParsedParts, Schemas], Waiting[None]] = _nothing  # reads calls with which an answer begins
    marks: tuple[str, ...] = ()  # its own texts; if they are special tokens, the text must keep them
    id_length: int = 24  # characters of a call's id; templates of Mistral's take no other


NO_CALLS = ToolFormat()
PHI_END = "<|/tool_call|>"
FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "tagged": ToolFormat((TOOL, FUNCTION), tagged_call, (TOOL_END,), marks=(TOOL, TOOL_END)),
        "llama3_json": ToolFormat(start=json_at_start, marks=(PYTHON_TAG,)),
        "mistral": ToolFormat(
            ("[TOOL_CALLS]",), list_or_named, marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_length=9
        ),
        "deepseek": ToolFormat(
            (CALLS, CALL), deepseek_call, (CALLS_END,), marks=(CALLS, CALL, CALL_NAME, CALL_END, CALLS_END)
        ),
        "phi4_mini": ToolFormat(
            ("<|tool_call|>", "functools"), list_or_named, (PHI_END,), marks=("<|tool_call|>", PHI_END)
        ),
        "pythonic": ToolFormat(start=pythonic),
    }
)
"""Formats by the names that gateway.tool_parser accepts."""


def answer(
    source: Source, parts: ParsedParts, schemas: Schemas, form: ToolFormat, stray: tuple[str, ...] = ()
) -> Waiting[None]:
    """Reads content and calls up to the end of the text. stray: a text that is dropped at the very beginning."""
    yield from form.start(source, parts, schemas)
    while True:
        mark = yield from source.upto((*form.openers, *form.closers, *stray), parts.content)
        if mark is None:
            return
        if mark in form.openers:
            yield from attempt(source, parts, mark, form.call(source, parts, schemas, mark), parts.content)
        elif mark in stray:
            stray = ()
            parts.drop_spaces()
            yield from source.spaces()
        elif not parts.num_calls:
            parts.content(mark)
