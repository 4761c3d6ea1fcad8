"""How models write what they think before they answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tandem.cluster.text.parsers.parts import Parts
from tandem.cluster.text.parsers.source import Source, Waiting

HEADER_MARKS = ("<|channel|>", "<|start|>", "<|message|>")
BODY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
HARMONY_MARKS = (*HEADER_MARKS, *BODY_ENDS, "<|constrain|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


@dataclass(frozen=True)
class ThinkTags:
    """What stands around the reasoning, at the begin of an answer. The prompt may have the first of them."""

    begin: str
    end: str


TAGS: Mapping[str, ThinkTags] = MappingProxyType(
    {"think": ThinkTags("<think>", "</think>"), "mistral": ThinkTags("[THINK]", "[/THINK]")}
)
"""By the names that gateway.reasoning_parser takes; so is HARMONY."""

HARMONY = "harmony"


def thinking(source: Source, parts: Parts, tags: ThinkTags, opened: bool) -> Waiting[None]:
    """Reads the reasoning, if there is any, and the spaces around it. opened: the prompt has the first tag."""
    if not opened:
        source.remember()
        yield from source.spaces()
        opened = (yield from source.starts(tags.begin)) is not None
        read = source.forget()
        if not opened:
            parts.content(read)
            return
    yield from source.spaces()
    yield from source.upto((tags.end,), Trimmed(parts).reasoning)
    yield from source.spaces()


class Trimmed:
    """Reasoning without the spaces at its end."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._spaces = ""

    def reasoning(self, text: str) -> None:
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._parts.reasoning(kept)


def harmony(source: Source, parts: Parts, *, calls: bool) -> Waiting[None]:
    """gpt-oss: messages with a header, which names a channel and perhaps a tool, and a body.

    The prompt ends in the begin of the first header. A text without marks is content. calls: whether tools may be
    called; if not, what is said to them is content.
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
        recipient = RECIPIENT.search(text) if calls else None
        if recipient is not None:
            parts.call(recipient[1])
            sink = parts.arguments
        else:
            sink = parts.reasoning if "analysis" in text else parts.content
        mark = yield from source.upto(BODY_ENDS, sink)
        if mark != "<|start|>":
            mark = yield from source.upto(("<|start|>",), parts.content)
        header.clear()
