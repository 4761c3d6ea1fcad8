"""The input of a response: items, and the chat that they make."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject, text_or_list
from tandem.cluster.protocol import MAX_MESSAGES


class InputText(BodyObject):
    """A part of a message, or of what a tool has answered."""

    refused = frozenset()

    type: Literal["input_text", "output_text", "text"] = Field(description="'input_text' or 'output_text'")
    text: str = Field(description="text")


Texts = TypeAliasType("Texts", Annotated[list[InputText], FailFast()])
Text = str | Texts
TEXT = "text, or a list of parts of type input_text or output_text"


class MessageItem(BodyObject):
    refused = frozenset()

    type: Literal["message"] = Field(default="message", description="'message'")
    role: str = Field(description="text")
    content: Text = Field(description=TEXT)


class CallItem(BodyObject):
    """A call of an earlier response."""

    refused = frozenset()

    type: Literal["function_call"] = Field(description="'function_call'")
    call_id: str = Field(description="text")
    name: str = Field(description="text")
    arguments: str = Field(default="{}", description="the text of a JSON object")


class CallOutputItem(BodyObject):
    """The result of a tool call."""

    refused = frozenset()

    type: Literal["function_call_output"] = Field(description="'function_call_output'")
    call_id: str = Field(description="text")
    output: Text = Field(description=TEXT)


class ReasoningText(BodyObject):
    refused = frozenset()

    type: Literal["reasoning_text", "summary_text"] = Field(description="'reasoning_text'")
    text: str = Field(description="text")


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class ReasoningItem(BodyObject):
    """The reasoning of an earlier response."""

    refused = frozenset()

    type: Literal["reasoning"] = Field(description="'reasoning'")
    content: ReasoningTexts | None = Field(default=None, description="a list of parts of type reasoning_text")


KINDS = {"function_call", "function_call_output", "reasoning"}


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) and kind in KINDS else "a message"


Item = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
Items = TypeAliasType("Items", Annotated[list[Item], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)])

Input = Annotated[Annotated[str, Tag("a text")] | Annotated[Items, Tag("a list")], Discriminator(text_or_list)]


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns the messages of a chat body. Reasoning and calls join the assistant's message next to them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                message = {"role": item.role, "content": _joined(item.content)}
                last = messages[-1] if messages else {}
                if item.role == "assistant" and last.get("role") == "assistant" and not last["content"]:
                    last["content"] = message["content"]
                else:
                    messages.append(message)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _assistants(messages).setdefault("tool_calls", []).append(call)
            case ReasoningItem():
                text = "".join(part.text for part in item.content or ())
                if text:
                    messages.append({"role": "assistant", "content": "", "reasoning_content": text})
            case CallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    return messages


def _assistants(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the last message if it is the assistant's, or else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(part.text for part in text)
