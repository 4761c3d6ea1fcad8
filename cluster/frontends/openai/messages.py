"""The messages of a chat, by OpenAI's names."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.frontends.openai.tool_fields import ToolCalls
from tandem.cluster.protocol import MAX_MESSAGES


class TextPart(Part):
    type: Literal["text"] = Field(description="'text'")
    text: str = Field(description="text")


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast()])


class Message(Part):
    refused = frozenset({"audio", "function_call"})

    role: str = Field(description="text")
    content: str | Parts = Field(description="text, or a list of parts of type text")
    name: str | None = Field(default=None, description="text")
    tool_calls: ToolCalls | None = Field(default=None, description="a list of calls with id, type and function")
    tool_call_id: str | None = Field(default=None, description="text")
    reasoning_content: str | None = Field(default=None, description="text")

    @model_validator(mode="before")
    @classmethod
    def _silent(cls, value: Any) -> Any:
        """An assistant that says nothing has null, or no content."""
        silent = isinstance(value, dict) and value.get("role") == "assistant" and value.get("content") is None
        return value | {"content": ""} if silent else value

    @property
    def text(self) -> str:
        """Parts are joined as vLLM joins them for templates that take strings."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    @property
    def turn(self) -> dict[str, Any]:
        """As build_request() takes it."""
        rest = self.model_dump(exclude={"role", "content"}, exclude_none=True)
        return {"role": self.role, "content": self.text, **{name: value for name, value in rest.items() if value}}


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)])
MESSAGES = f"a list of 1 to {MAX_MESSAGES} messages with role and content"
