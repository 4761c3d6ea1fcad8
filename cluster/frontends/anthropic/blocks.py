"""The messages of a body: blocks of content, and the chat that they make."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject, text_or_list
from tandem.cluster.protocol import MAX_MESSAGES


class TextBlock(BodyObject):
    refused = frozenset()

    type: Literal["text"] = Field(description="'text'")
    text: str = Field(description="text")


Texts = TypeAliasType("Texts", Annotated[list[TextBlock], FailFast()])
Text = str | Texts
TEXT = "text, or a list of blocks of type text"


class ThinkingBlock(BodyObject):
    """The reasoning of an earlier answer."""

    refused = frozenset()

    type: Literal["thinking"] = Field(description="'thinking'")
    thinking: str = Field(description="text")


class ToolUseBlock(BodyObject):
    """A call of an earlier answer."""

    refused = frozenset()

    type: Literal["tool_use"] = Field(description="'tool_use'")
    id: str = Field(description="text")
    name: str = Field(description="text")
    input: dict[str, Any] = Field(default_factory=dict, description="an object")


class ToolResultBlock(BodyObject):
    """The result of a tool call."""

    refused = frozenset()

    type: Literal["tool_result"] = Field(description="'tool_result'")
    tool_use_id: str = Field(description="text")
    content: Text = Field(default="", description=TEXT)


KINDS = {"thinking", "tool_use", "tool_result"}


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) and kind in KINDS else "a text block"


Block = Annotated[
    Annotated[TextBlock, Tag("a text block")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]
Blocks = TypeAliasType("Blocks", Annotated[list[Block], FailFast()])


Said = Annotated[Annotated[str, Tag("a text")] | Annotated[Blocks, Tag("a list")], Discriminator(text_or_list)]


class Turn(BodyObject):
    refused = frozenset()

    role: Literal["user", "assistant"] = Field(description="'user' or 'assistant'")
    content: Said = Field(description="text, or a list of blocks of type text, thinking, tool_use or tool_result")


Turns = TypeAliasType("Turns", Annotated[list[Turn], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)])


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Returns the messages of a chat body. Tools' results come before a user's other words."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += _messages(turn.role, turn.content)
    return messages


def joined(text: Text) -> str:
    """Joins blocks as the parts of a chat's message are joined."""
    return text if isinstance(text, str) else "\n".join(block.text for block in text)


def _messages(role: str, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    said: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
            for call in calls
        ]
    answers = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)} for block in results
    ]
    return answers + ([said] if texts or calls or thoughts or not results else [])
