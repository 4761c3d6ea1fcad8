"""Takes the text of one answer apart as it comes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tandem.cluster.text.parsers.calls import read_arguments
from tandem.cluster.text.parsers.json_calls import calls_of_list
from tandem.cluster.text.parsers.parts import ParsedPart, ParsedParts
from tandem.cluster.text.parsers.reasoning import ThinkTags, harmony, thinking
from tandem.cluster.text.parsers.source import Malformed, Source, Waiting
from tandem.cluster.text.parsers.tool_formats import NO_CALLS, ToolFormat, answer


@dataclass(frozen=True)
class Calls:
    """The tool calls that a request allows. schemas: of the parameters, by the tool's name."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    required: bool = False  # the output is guided to be a JSON list of calls
    named: str = ""  # the output is guided to be the arguments of this tool
    most: int | None = None  # of calls that are answered

    @property
    def forced(self) -> bool:
        """True if the output is JSON, whatever the model's own format is."""
        return self.required or bool(self.named)


class OutputParser:
    """Parses one answer. The parts that it returns do not depend on how the text is cut."""

    def __init__(
        self,
        calls: Calls | None,
        tool_format: ToolFormat | None,
        tags: ThinkTags | None,
        *,
        opened: bool = False,
        speaks_harmony: bool = False,
        dropped: Sequence[str] = (),
    ) -> None:
        """calls: None when no tool may be called. opened: the prompt opens the reasoning. dropped: texts of special
        tokens, which are no part of an answer."""
        expects = calls is not None
        id_length = tool_format.id_length if tool_format is not None else 24
        most = calls.most if calls is not None else None
        self._parts = ParsedParts(most_calls=most, id_length=id_length, keep_spaces=not expects)
        self._source = Source()
        self._dropped = re.compile("|".join(map(re.escape, dropped))) if dropped else None
        self._reading = self._read(calls, tool_format or NO_CALLS, tags, opened, speaks_harmony)
        self._over = False
        self._advance()

    @property
    def num_calls(self) -> int:
        return self._parts.num_calls

    def push(self, text: str) -> list[ParsedPart]:
        """Returns the parts that this text completes."""
        self._source.push(text if self._dropped is None else self._dropped.sub("", text))
        self._advance()
        return self._parts.take()

    def finish(self, *, cut: bool = False) -> list[ParsedPart]:
        """Returns the last parts. No text comes any more; cut: because of max_tokens."""
        self._source.ended, self._source.cut = True, cut
        self._advance()
        self._parts.finish()
        return self._parts.take()

    def _advance(self) -> None:
        if not self._over:
            try:
                next(self._reading)
            except StopIteration:
                self._over = True

    def _read(
        self, calls: Calls | None, form: ToolFormat, tags: ThinkTags | None, opened: bool, speaks_harmony: bool
    ) -> Waiting[None]:
        source, parts = self._source, self._parts
        schemas = {} if calls is None else calls.schemas
        forced = calls is not None and calls.forced
        if speaks_harmony and not forced:
            yield from harmony(source, parts, schemas)
            return
        form = NO_CALLS if calls is None or forced else form
        stray: tuple[str, ...] = ()
        if tags is not None and (yield from thinking(source, parts, tags, opened, schemas, form)):
            stray = (tags.end,)
        if calls is not None and forced:
            yield from _forced(source, parts, calls)
        yield from answer(source, parts, schemas, form, stray)


def _forced(source: Source, parts: ParsedParts, calls: Calls) -> Waiting[None]:
    """Parses guided output: arguments, or a list of calls. Output that breaks off, or is neither, stays unchanged."""
    try:
        if calls.named:
            yield from read_arguments(source, parts, calls.named)
        else:
            yield from calls_of_list(source, parts, calls.schemas)
    except Malformed:
        pass
