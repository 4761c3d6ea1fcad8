"""Formats in which models write their thoughts before they answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.cluster.text.parsers.calls import Schemas, attempt
from tandem.cluster.text.parsers.parts import ParsedParts, Spaces
from tandem.cluster.text.parsers.source import Sink, Source, Waiting
from tandem.cluster.text.parsers.tool_formats import ToolFormat

HEADER_MARKS = ("<|channel|>", "<|start|>", "<|message|>")
BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_MARKS = (*HEADER_MARKS, *BODY_ENDS, "<|constrain|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


@dataclass(frozen=True)
class ThinkTags:
    """The tags around the reasoning, at the begin of an answer. The prompt may have the first of them."""

    begin: str
    end: str


TAGS: Mapping[str, ThinkTags] = MappingProxyType(
    {"think": ThinkTags("<think>", "</think>"), "mistral": ThinkTags("[THINK]", "[/THINK]")}
)
"""Tags by the names that gateway.reasoning_parser accepts. It accepts HARMONY, too."""

HARMONY = "harmony"


def thinking(
    source: Source, parts: ParsedParts, tags: ThinkTags, opened: bool, schemas: Schemas, form: ToolFormat
) -> Waiting[bool]:
    """Reads the reasoning, if there is any, and the spaces around it. opened: the prompt has the first tag.

    Returns True if a call, in this form, ended it: the last tag may still come. A text that only looks like a call is
    reasoning.
    """
    if not opened:
        source.remember()
        yield from source.spaces()
        begun = (yield from source.starts(tags.begin)) is not None
        read = source.forget()
        if not begun:
            parts.content(read)
            return False
    yield from source.spaces()
    if opened and (yield from source.starts(tags.begin)) is not None:  # once more
        yield from source.spaces()
    sink = Trimmed(parts).reasoning
    while (mark := (yield from source.upto((tags.end, *form.openers), sink))) in form.openers:
        if (yield from attempt(source, parts, mark, form.call(source, parts, schemas, mark), sink)):
            return True
    yield from source.spaces()
    return False


class Trimmed:
    """Reasoning without the spaces at its end."""

    def __init__(self, parts: ParsedParts) -> None:
        self._parts = parts
        self._spaces = Spaces()

    def reasoning(self, text: str) -> None:
        self._parts.reasoning(self._spaces.before(text))


def harmony(source: Source, parts: ParsedParts, schemas: Schemas) -> Waiting[None]:
    """Reads gpt-oss's format: messages with a header, which names a channel and perhaps a tool, and a body.

    The prompt ends in the begin of the first header. A text without marks is content. So is a message to a tool that is
    not offered, or whose body is no object.
    """
    header: list[str] = []
    mark = yield from source.starts(" to=")
    if mark is not None:
        header.append("to=")
    else:
        mark = yield from source.upto(HEADER_MARKS, parts.content)
    while mark is not None:
        if mark != "<|message|>":
            yield from source.upto(("<|message|>",), header.append)
        text = "".join(header)
        recipient = RECIPIENT.search(text)
        name = "" if recipient is None or recipient[1] not in schemas else recipient[1]
        mark = yield from _body(source, parts, name, parts.reasoning if "analysis" in text else parts.content)
        if mark != "<|start|>":
            mark = yield from source.upto(("<|start|>",), parts.content)
        header.clear()


def _body(source: Source, parts: ParsedParts, name: str, sink: Sink) -> Waiting[str | None]:
    """Reads a body and the mark after it. name: the tool that the message is for; empty for none."""
    if not name:
        return (yield from source.upto(BODY_ENDS, sink))
    spaces: list[str] = []
    yield from source.spaces(spaces.append)
    if (yield from source.peek()) == "{":
        parts.call(name)
        mark = yield from source.upto(BODY_ENDS, parts.arguments)
        parts.end_call()
        return mark
    mark = yield from source.starts(*BODY_ENDS)
    if mark is not None:
        parts.call(name)
        parts.arguments("{}")
        parts.end_call()
        return mark
    sink("".join(spaces))
    return (yield from source.upto(BODY_ENDS, sink))
