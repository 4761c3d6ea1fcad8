"""Chooses the formats of a checkpoint's answers: by its configuration, else by its chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.parsers.json_calls import CALLS
from tandem.cluster.text.parsers.output_parser import Calls, OutputParser
from tandem.cluster.text.parsers.reasoning import HARMONY, HARMONY_MARKS, TAGS, ThinkTags
from tandem.cluster.text.parsers.tool_formats import FORMATS, ToolFormat
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

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
MOST_KNOWN = 64  # template variables whose prompts' last words are known
ANY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
LEAST_THINKING = 64  # of max_tokens; with fewer a guided output begins at once


class Left(Enum):
    """The state in which a prompt leaves the model's reasoning."""

    OPEN = "the prompt ends in the first of the tags"
    OVER = "the prompt ends in the last of the tags, or within the answer"
    TO_COME = "the answer may begin with it"


@dataclass(frozen=True)
class Format:
    """The format of one checkpoint's answers."""

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
        self._reasoning: dict[str, Left] = {}

    @property
    def takes_tools(self) -> bool:
        """True if the answers of a model that may call a tool can be parsed."""
        return self._format.speaks_harmony or self._format.tools is not None

    def needs_special_tokens(self, calls: Calls | None) -> bool:
        """Returns whether texts must keep the special tokens in them, because some are marks."""
        if calls is not None and calls.forced:
            return any(mark in self._special for mark in self._tags())
        return self._marked and self._parses(calls)

    def parser(self, calls: Calls | None, *, opened: bool, keep_special: bool) -> OutputParser | None:
        """Makes a parser; None if the whole answer is content. keep_special: special tokens that are no marks are
        content."""
        if not self._parses(calls):
            return None
        marks = self._marks()
        drops = self.needs_special_tokens(calls) and not keep_special
        dropped = [text for text in self._special if text not in marks] if drops else []
        form = self._format
        return OutputParser(
            calls, form.tools, form.tags, opened=opened, speaks_harmony=form.speaks_harmony, dropped=dropped
        )

    def reasoning(self, chat: inference_pb2.Chat, variables: Mapping[str, Any], *, begins: bool) -> Left:
        """Returns the state in which a chat's prompt leaves the reasoning. begins: the prompt ends where an answer
        begins, else in its last message."""
        tags, tokenizer = self._format.tags, self._tokenizer
        if tags is None or tokenizer is None:
            return Left.OVER
        if not begins:
            said = chat.messages[-1].content if chat.messages and chat.continue_final_message else ""
            return Left.OPEN if said.rfind(tags.begin) > said.rfind(tags.end) else Left.OVER
        tools = [ANY_TOOL] if chat.tools else None  # the checkpoint may have a template for requests with tools
        key = json.dumps([tools is None, variables], sort_keys=True)
        if key not in self._reasoning:
            if len(self._reasoning) >= MOST_KNOWN:
                self._reasoning.clear()
            self._reasoning[key] = _left(tokenizer, tools, variables, tags)
        return self._reasoning[key]

    def think_before(self, guided: inference_pb2.Guided, reasoning: Left, max_tokens: int | None) -> Left:
        """Lets the model think before its output follows a guide. Returns the state in which the parser then begins.

        Does nothing with few tokens, or if the guide itself has the tags. A model that begins to think by itself has a
        token for that.
        """
        tags, tokenizer = self._format.tags, self._tokenizer
        if tags is None or tokenizer is None or any(tag in text for text in _texts(guided) for tag in self._tags()):
            return reasoning
        begins = len(tokenizer.encode(tags.begin, add_special_tokens=False)) == 1
        thinks = reasoning == Left.OPEN or (reasoning == Left.TO_COME and begins)
        if not thinks or (max_tokens is not None and max_tokens < LEAST_THINKING):
            return Left.OVER
        guided.thinking.begin, guided.thinking.end = tags.begin, tags.end
        guided.thinking.opened = reasoning == Left.OPEN
        return reasoning

    def _parses(self, calls: Calls | None) -> bool:
        form = self._format
        return calls is not None or form.tags is not None or form.speaks_harmony

    def _tags(self) -> tuple[str, ...]:
        tags = self._format.tags
        return () if tags is None else (tags.begin, tags.end)

    def _marks(self) -> tuple[str, ...]:
        form = self._format
        tools = () if form.tools is None else form.tools.marks
        return (*self._tags(), *tools, *(HARMONY_MARKS if form.speaks_harmony else ()))


def _shown(template: str, marks: tuple[tuple[str, str], ...]) -> str:
    return next((name for mark, name in marks if mark in template), NONE)


def _left(
    tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, variables: Mapping[str, Any], tags: ThinkTags
) -> Left:
    messages = [{"role": "user", "content": "?"}]
    try:
        prompt = tokenizer.render_chat(messages, tools=tools, variables=variables).rstrip()
    except ChatTemplateError:
        return Left.TO_COME
    if prompt.endswith(tags.begin):
        return Left.OPEN
    return Left.OVER if prompt.endswith(tags.end) else Left.TO_COME


def _texts(guided: inference_pb2.Guided) -> Sequence[str]:
    """Returns the guide's texts that may contain the model's tags for reasoning. A schema has none."""
    return (guided.regex, guided.grammar, *guided.choice.texts)
