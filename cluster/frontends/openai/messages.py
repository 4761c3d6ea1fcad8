"""The messages of a chat, by OpenAI's names."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject, text_or_list
from tandem.cluster.frontends.openai.tool_fields import ToolCalls
from tandem.cluster.protocol import MAX_MESSAGES


class TextPart(BodyObject):
    refused = frozenset()

    type: Literal["text", "input_text", "output_text"] = Field(description="'text'")
    text: str = Field(description="text")


class RefusalPart(BodyObject):
    """An assistant's words, too."""

    refused = frozenset()

    type: Literal["refusal"] = Field(description="'refusal'")
    refusal: str = Field(description="text")

    @property
    def text(self) -> str:
        return self.refusal


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "a text part"


AnyPart = Annotated[
    Annotated[TextPart, Tag("a text part")] | Annotated[RefusalPart, Tag("a refusal")], Discriminator(_kind)
]
Parts = TypeAliasType("Parts", Annotated[list[AnyPart], FailFast()])
Said = Annotated[Annotated[str, Tag("a text")] | Annotated[Parts, Tag("a list")], Discriminator(text_or_list)]


class Message(BodyObject):
    refused = frozenset({"audio", "function_call"})

    role: str = Field(description="text")
    content: Said = Field(description="text, or a list of parts of type text")
    name: str | None = Field(default=None, description="text")
    tool_calls: ToolCalls | None = Field(default=None, description="a list of calls with id, type and function")
    tool_call_id: str | None = Field(default=None, description="text")
    reasoning_content: str | None = Field(default=None, description="text")

    @model_validator(mode="before")
    @classmethod
    def _as_others_write_it(cls, value: Any) -> Any:
        """An assistant or a tool that says nothing has null, or no content. Newer versions of vLLM call an assistant's
        reasoning so."""
        if not isinstance(value, dict):
            return value
        silent = value.get("role") in ("assistant", "tool") and value.get("content") is None
        thought = {"reasoning_content": value["reasoning"]} if isinstance(value.get("reasoning"), str) else {}
        return thought | value | ({"content": ""} if silent else {})

    @property
    def text(self) -> str:
        """Returns the parts joined as vLLM joins them for templates that take strings."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    @property
    def turn(self) -> dict[str, Any]:
        """Returns the turn that build_request() takes."""
        rest = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        return {"role": self.role, "content": self.text, **{name: value for name, value in rest.items() if value}}


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)])
MESSAGES = f"a list of 1 to {MAX_MESSAGES} messages with role and content"
