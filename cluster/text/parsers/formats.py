"""Which formats a checkpoint's answers have: what its configuration says, else what its chat template shows."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.parsers.json_calls import CALLS
from tandem.cluster.text.parsers.output_parser import Calls, OutputParser
from tandem.cluster.text.parsers.reasoning import HARMONY, HARMONY_MARKS, TAGS, ThinkTags
from tandem.cluster.text.parsers.tool_formats import FORMATS, ToolFormat
from tandem.cluster.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
SHOWN_TOOLS = (  # the first mark that a template has decides
    ("<|channel|>", HARMONY),
    (CALLS, "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "tagged"),
    ("<|tool_call|>", "phi4_mini"),
    ("<|tool|>", "phi4_mini"),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)
SHOWN_REASONING = (("<|channel|>", HARMONY), ("[THINK]", "mistral"), ("<think>", "think"), ("</think>", "think"))
MOST_KNOWN = 64  # template variables whose prompts are known to open the reasoning or not


@dataclass(frozen=True)
class Format:
    """What one checkpoint's answers look like."""

    tools: ToolFormat | None = None
    tags: ThinkTags | None = None
    speaks_harmony: bool = False


class OutputFormats:
    """Makes the parsers of a gateway's answers. Owned by its event loop."""

    def __init__(self, tokenizer: Tokenizer | None, tools: str = AUTO, reasoning: str = AUTO) -> None:
        """tools, reasoning: a name, AUTO or NONE."""
        template = "" if tokenizer is None else tokenizer.template_source
        tools = _shown(template, SHOWN_TOOLS) if tools == AUTO else tools
        reasoning = _shown(template, SHOWN_REASONING) if reasoning == AUTO else reasoning
        self._tokenizer = tokenizer
        self._format = Format(FORMATS.get(tools), TAGS.get(reasoning), HARMONY in (tools, reasoning))
        special = frozenset() if tokenizer is None else tokenizer.special_texts
        self._special = tuple(sorted(special, key=len, reverse=True))
        self._marked = any(mark in special for mark in self._marks())
        self._opened: dict[str, bool] = {}

    @property
    def takes_tools(self) -> bool:
        """Whether a model that is free to call a tool or not can be understood."""
        return self._format.speaks_harmony or self._format.tools is not None

    def needs_special_tokens(self, calls: Calls | None) -> bool:
        """Whether texts must keep the special tokens in them, for some are marks."""
        forced = calls is not None and calls.forced
        return self._marked and not forced and self._parses(calls)

    def parser(self, calls: Calls | None, *, opened: bool, keep_special: bool) -> OutputParser | None:
        """None where an answer is content as it stands. keep_special: special tokens that are no marks are content."""
        if not self._parses(calls):
            return None
        marks = self._marks()
        drops = self.needs_special_tokens(calls) and not keep_special
        dropped = [text for text in self._special if text not in marks] if drops else []
        form = self._format
        return OutputParser(
            calls, form.tools, form.tags, opened=opened, speaks_harmony=form.speaks_harmony, dropped=dropped
        )

    def opens_reasoning(self, variables: Mapping[str, Any]) -> bool:
        """Whether a prompt that is rendered with these variables ends in the first of the tags."""
        tags, tokenizer = self._format.tags, self._tokenizer
        if tags is None or tokenizer is None:
            return False
        key = json.dumps(variables, sort_keys=True)
        if key not in self._opened:
            if len(self._opened) >= MOST_KNOWN:
                self._opened.clear()
            self._opened[key] = _ends_in(tokenizer, variables, tags.begin)
        return self._opened[key]

    def _parses(self, calls: Calls | None) -> bool:
        form = self._format
        return calls is not None or form.tags is not None or form.speaks_harmony

    def _marks(self) -> tuple[str, ...]:
        form = self._format
        tags = () if form.tags is None else (form.tags.begin, form.tags.end)
        tools = () if form.tools is None else form.tools.marks
        return (*tags, *tools, *(HARMONY_MARKS if form.speaks_harmony else ()))


def _shown(template: str, marks: tuple[tuple[str, str], ...]) -> str:
    return next((name for mark, name in marks if mark in template), NONE)


def _ends_in(tokenizer: Tokenizer, variables: Mapping[str, Any], tag: str) -> bool:
    try:
        prompt = tokenizer.render_chat([{"role": "user", "content": "?"}], variables=variables)
    except ChatTemplateError:
        return False
    return prompt.rstrip().endswith(tag)
