"""/v1/responses: its body."""

from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.generation_body import SERVICE_TIER
from tandem.cluster.frontends.openai.sampling_fields import MAX_LISTED, ONE_ANSWER, OneAnswerFields
from tandem.cluster.frontends.openai.tool_fields import MAX_TOOLS, NAME, NAME_WORDS
from tandem.cluster.frontends.openai.translated_body import TranslatedBody
from tandem.cluster.frontends.responses.items import Input, messages_of

MAX_METADATA = 16  # pairs, as OpenAI takes them
LOGPROBS = "message.output_text.logprobs"
SAME = (
    "logit_bias",
    "structured_outputs",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "cache_salt",
    "request_id",
    "service_tier",
    "stream",
)
"""Fields, beside sampling parameters, that a chat has by the same names."""
Included = TypeAliasType("Included", Annotated[list[str], FailFast(), Field(max_length=MAX_LISTED)])


class ResponseTool(BodyObject):
    """A function that the model may call."""

    refused = frozenset()

    type: Literal["function"] = Field(description="'function'")
    name: str = Field(pattern=NAME, description=NAME_WORDS)
    description: str | None = Field(default=None, description="text")
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema, as an object")
    strict: bool | None = Field(default=None, description="true or false")

    @property
    def chat_tool(self) -> dict[str, Any]:
        """Returns the tool in a chat's form."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


ResponseTools = TypeAliasType("ResponseTools", Annotated[list[ResponseTool], FailFast(), Field(max_length=MAX_TOOLS)])


class NamedResponseTool(BodyObject):
    type: Literal["function"] = Field(description="'function'")
    name: str = Field(description=NAME_WORDS)


class TextFormat(BodyObject):
    refused = frozenset()

    type: Literal["text", "json_object", "json_schema"] = Field(description="'text', 'json_object' or 'json_schema'")
    name: str = Field(default="", description="text")
    strict: bool = Field(default=True, description="true or false")
    held: dict[str, Any] | None = Field(default=None, alias="schema", description="a JSON schema, as an object")

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.held is not None):
            raise ValueError("needs schema with type 'json_schema', and takes it with no other type")
        return self

    @property
    def chat_format(self) -> dict[str, Any]:
        """Returns the format as a chat's response_format."""
        if self.held is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "strict": self.strict, "schema": self.held}}


class TextOptions(BodyObject):
    refused = frozenset()

    format: TextFormat | None = Field(default=None, description="an object with type")


class ReasoningOptions(BodyObject):
    """effort goes to the chat template."""

    refused = frozenset()

    effort: str | None = Field(default=None, description="text")
    summary: str | None = Field(default=None, description="text")


Word = Annotated[Literal["none", "auto", "required"], Tag("a word")]
Choice = Annotated[
    Word | Annotated[NamedResponseTool, Tag("a name")],
    Discriminator(lambda value: "a name" if isinstance(value, dict | NamedResponseTool) else "a word"),
]


class ResponsesBody(TranslatedBody, OneAnswerFields):
    """POST /v1/responses. Nothing is stored: each request brings all of its input."""

    renamed = MappingProxyType(
        {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "max_tokens": "max_output_tokens",
            "response_format": "text",
        }
    )
    prompt_fields = ("input",)

    input: Input = Field(description="text, or a list of items")
    instructions: str | None = Field(default=None, description="text")
    max_output_tokens: int | None = Field(default=None, description="an integer of at least 1")
    logit_bias: dict[str, Any] | None = Field(default=None, description="an object of token ids and numbers")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="an object with json, regex, choice, grammar or json_object"
    )
    text: TextOptions | None = Field(default=None, description="an object with format")
    tools: ResponseTools | None = Field(
        default=None, description=f"a list of at most {MAX_TOOLS} objects with type 'function' and name"
    )
    tool_choice: Choice | None = Field(
        default=None, description="'none', 'auto', 'required' or an object with type 'function' and name"
    )
    parallel_tool_calls: bool = Field(default=True, description="true or false")
    reasoning: ReasoningOptions | None = Field(default=None, description="an object with effort")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="an object")
    cache_salt: str | None = Field(default=None, description="text")
    request_id: str | None = Field(default=None, description="text")
    service_tier: str | None = Field(default=None, description=SERVICE_TIER)
    metadata: dict[str, str] | None = Field(
        default=None, max_length=MAX_METADATA, description=f"an object of at most {MAX_METADATA} texts"
    )
    top_logprobs: int | None = Field(default=None, description="an integer")
    previous_response_id: None = Field(default=None, description="null: no response is stored here")
    conversation: None = Field(default=None, description="null: no response is stored here")
    prompt: None = Field(default=None, description="null: no prompt is stored here")
    background: Literal[False] = Field(default=False, description="false")
    truncation: Literal["disabled", "auto"] | None = Field(default=None, description="'disabled' or 'auto'")
    include: Included | None = Field(default=None, description="a list of texts")

    @model_validator(mode="after")
    def _of_logprobs(self) -> Self:
        if self.top_logprobs and not self.includes_logprobs:
            raise ValueError(f"top_logprobs is of use only with {LOGPROBS!r} in include")
        return self

    @property
    def includes_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def translated(self) -> dict[str, Any]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += messages_of(self.input)
        choice: Any = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        form = None if self.text is None else self.text.format
        same = (*(field.name for field in ONE_ANSWER), *SAME)
        return {name: getattr(self, name) for name in same} | {
            "messages": messages,
            "logprobs": self.includes_logprobs,
            "top_logprobs": self.top_logprobs,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": None if form is None else form.chat_format,
            "tools": None if self.tools is None else [tool.chat_tool for tool in self.tools],
            "tool_choice": choice,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
