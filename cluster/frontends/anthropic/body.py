"""/v1/messages: its body."""

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.anthropic.blocks import TEXT, Text, Turns, joined, messages_of
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.generation_body import SERVICE_TIER
from tandem.cluster.frontends.openai.messages import MESSAGES
from tandem.cluster.frontends.openai.sampling_fields import StopTexts
from tandem.cluster.frontends.openai.tool_fields import MAX_TOOLS, NAME, NAME_WORDS
from tandem.cluster.frontends.openai.translated_body import TranslatedBody
from tandem.proto import inference_pb2


class MessagesTool(BodyObject):
    """A function that the model may call. Tools of Anthropic's own, which have other types, are refused."""

    refused = frozenset()

    type: Literal["custom"] = Field(default="custom", description="'custom'")
    name: str = Field(pattern=NAME, description=NAME_WORDS)
    description: str | None = Field(default=None, description="text")
    input_schema: dict[str, Any] = Field(description="a JSON schema, as an object")

    @property
    def chat_tool(self) -> dict[str, Any]:
        """Returns the tool in a chat's form."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


MessagesTools = TypeAliasType("MessagesTools", Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TOOLS)])


class MessagesChoice(BodyObject):
    type: Literal["auto", "any", "tool", "none"] = Field(description="'auto', 'any', 'tool' or 'none'")
    name: str | None = Field(default=None, description=NAME_WORDS)
    disable_parallel_tool_use: bool = Field(default=False, description="true or false")

    @property
    def chat_choice(self) -> Any:
        """Returns the choice as a chat's tool_choice."""
        named = {"type": "function", "function": {"name": self.name or ""}}
        return {"auto": "auto", "none": "none", "any": "required", "tool": named}[self.type]


class Thinking(BodyObject):
    """The settings of the model's thinking. They change nothing: the chat template says how the model thinks."""

    refused = frozenset()

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="'enabled' or 'disabled'")


class OutputFormat(BodyObject):
    """The format that the output follows."""

    refused = frozenset()

    type: Literal["json_schema"] = Field(description="'json_schema'")
    held: dict[str, Any] = Field(alias="schema", description="a JSON schema, as an object")

    @property
    def chat_format(self) -> dict[str, Any]:
        """Returns the format as a chat's response_format."""
        return {"type": self.type, "json_schema": {"schema": self.held}}


class OutputConfig(BodyObject):
    refused = frozenset()

    effort: str | None = Field(default=None, description="text")
    format: OutputFormat | None = Field(default=None, description="an object with type and schema")


class ChatLikeBody(TranslatedBody):
    """The fields that a prompt is made of."""

    renamed = MappingProxyType(
        {
            "max_completion_tokens": "max_tokens",
            "stop": "stop_sequences",
            "response_format": "output_config",
        }
    )
    prompt_fields = ("messages", "system")

    messages: Turns = Field(description=MESSAGES)
    system: Text | None = Field(default=None, description=TEXT)
    tools: MessagesTools | None = Field(
        default=None, description=f"a list of at most {MAX_TOOLS} objects with name and input_schema"
    )
    tool_choice: MessagesChoice | None = Field(default=None, description="an object with type")
    thinking: Thinking | None = Field(default=None, description="an object with type")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="an object")

    def translated(self) -> dict[str, Any]:
        """Returns the chat's fields. If the last message is the assistant's, the answer continues it."""
        messages = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        choice = self.tool_choice
        return {
            "messages": messages + messages_of(self.messages),
            "continue_final_message": self.messages[-1].role == "assistant",
            "tools": None if self.tools is None else [tool.chat_tool for tool in self.tools],
            "tool_choice": None if choice is None else choice.chat_choice,
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class MessagesBody(ChatLikeBody):
    """POST /v1/messages."""

    max_tokens: int = Field(description="an integer of at least 1")
    stop_sequences: StopTexts | None = Field(default=None, description="a list of texts")
    temperature: float | None = Field(default=None, description="a number")
    top_p: float | None = Field(default=None, description="a number")
    top_k: int | None = Field(default=None, description="an integer")
    first_token_seconds: float | None = Field(default=None, description="a number")
    priority: int | None = Field(default=None, description="an integer")
    service_tier: str | None = Field(default=None, description=SERVICE_TIER)
    metadata: dict[str, Any] | None = Field(default=None, description="an object")
    output_config: OutputConfig | None = Field(default=None, description="an object with effort and format")
    output_format: OutputFormat | None = Field(default=None, description="an object with type and schema")

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """Returns the requests. They ask for the prompt's length, which a stream's first event tells."""
        requests = super().requests()
        for request in requests:
            request.return_prompt_token_ids = self.stream
        return requests

    def translated(self) -> dict[str, Any]:
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        return super().translated() | {
            "reasoning_effort": config.effort,
            "response_format": None if form is None else form.chat_format,
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "first_token_seconds": self.first_token_seconds,
            "priority": self.priority,
            "service_tier": self.service_tier,
            "stream": self.stream,
        }
