"""Request bodies of the HTTP server: OpenAI's API, with vLLM's further sampling parameters."""

import difflib
import json
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.protocol import MAX_MESSAGES, Prompt, accepted_value, build_request
from tandem.cluster.requests.cache_salt import MAX_CACHE_SALT
from tandem.proto import inference_pb2

HARMLESS = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Parameters that name a request or its owner, and change no answer."""

ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_special_tokens": (True,),
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "n": (1,),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_logprobs": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Parameters that are not supported here, with the values that ask for nothing."""

MAX_FIELDS = 100  # of an object
MAX_LISTED = 1024  # of a sampling parameter; the request validator has limits of its own
LONGEST_NAME = 80  # characters of an unknown field that an answer shows
BodyT = TypeVar("BodyT", bound="GenerationBody")


class Part(BaseModel):
    """Frozen. It takes no unknown field and converts no type but int to float. null stands for a missing field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # a finding for each would take memory and time
            raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are accepted")
        return {name: held for name, held in value.items() if held is not None} if isinstance(value, dict) else value


class StreamOptions(Part):
    include_usage: bool = Field(default=False, description="true or false")


class TextPart(Part):
    type: Literal["text"] = Field(description="'text'")
    text: str = Field(description="text")


# Of lists only the first fault is found, or a body of a few megabytes would make gigabytes of findings.
Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast()])
StopTexts = TypeAliasType("StopTexts", Annotated[list[str], FailFast(), Field(max_length=MAX_LISTED)])
StopIds = TypeAliasType("StopIds", Annotated[list[int], FailFast(), Field(max_length=MAX_LISTED)])
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])


class Message(Part):
    role: str = Field(description="text")
    content: str | Parts = Field(description="text, or a list of parts of type text")

    @property
    def text(self) -> str:
        """Parts are joined as vLLM joins them for templates that take strings."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


def _sampling_field(field: FieldDescriptor) -> tuple[Any, Any]:
    """Type and default of the sampling parameter that a protobuf field holds."""
    kind: Any = type(field.default_value)
    accepted = accepted_value(field.name)
    if field.is_repeated and field.type == FieldDescriptor.TYPE_STRING:
        kind, accepted = str | StopTexts, "text, or a list of texts"
    elif field.is_repeated:
        kind, accepted = StopIds, "a list of token ids"
    return kind | None, Field(default=None, description=accepted)


SAMPLING = [field for field in inference_pb2.SamplingParams.DESCRIPTOR.fields if field.message_type is None]
if TYPE_CHECKING:
    SamplingFields = Part
else:
    SamplingFields = create_model(
        "SamplingFields", __base__=Part, **{field.name: _sampling_field(field) for field in SAMPLING}
    )
"""All sampling parameters of the protocol that are numbers or texts, or lists of them."""


class GenerationBody(SamplingFields, ABC):
    """The common part of completions and chats. The request validator checks limits."""

    renamed: ClassVar[Mapping[str, str]]
    """This body's name for each field that the gateway's messages name otherwise."""
    open_ended: ClassVar[int | None] = None
    """See RequestValidator.validate."""
    prompt_field: ClassVar[str]
    """What may be large: see without_prompt()."""

    model: str | None = Field(default=None, description="the served model's name")
    stream: bool = Field(default=False, description="true or false")
    stream_options: StreamOptions | None = Field(default=None, description="an object with include_usage")
    max_tokens: int | None = Field(default=None, description="an integer of at least 1")
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description=f"a text of 1 to {MAX_CACHE_SALT} characters",
    )
    return_token_ids: bool = Field(default=False, description="true or false")
    return_tokens_as_token_ids: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is of use only with stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def request(self) -> inference_pb2.GenerateRequest:
        """The gateway's request. Raises InvalidRequest, with the gateway's names: see blame()."""
        given = {field.name: getattr(self, field.name) for field in SAMPLING}
        sampling = given | {"logprobs": self.num_logprobs, "max_tokens": self.most_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        return build_request(self.input, given, None, self.cache_salt or "")

    def check_length(self, max_tokens: int) -> None:
        """Refuses a prompt whose length is known and that no request of so many tokens has room for, before it
        travels. Raises HttpError."""

    def without_prompt(self) -> Self:
        """The body as far as its answer needs it, once there is a request()."""
        return self.model_copy(update={self.prompt_field: None, "stop": None, "stop_token_ids": None})

    @property
    @abstractmethod
    def input(self) -> Prompt: ...

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """As SamplingParams.logprobs."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def blame(self, error: InvalidRequest) -> HttpError:
        """The gateway's refusal in the words of this body."""
        found = re.match(r"(?:sampling\.)?(\w+)", str(error))
        name = found[1] if found else ""
        param = self.renamed.get(name, name)
        if found is None or param not in type(self).model_fields:
            return HttpError(400, str(error))
        return HttpError(400, param + str(error)[found.end() :], param=param)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    renamed = MappingProxyType({"text": "prompt", "token_bytes": "prompt"})
    prompt_field = "prompt"

    prompt: str | TokenIds = Field(description="text, or a list of token ids")
    logprobs: int | None = Field(default=None, description="an integer")

    @field_validator("prompt", mode="before")
    @classmethod
    def _one(cls, prompt: object) -> object:
        if prompt in ([], [[]]):
            raise ValueError("is empty; at least one token id is needed")
        if not isinstance(prompt, list) or not isinstance(prompt[0], str | list):
            return prompt
        if len(prompt) > 1:
            raise ValueError(f"has {len(prompt)} prompts; one a request is accepted: text, or a list of token ids")
        return prompt[0]

    def check_length(self, max_tokens: int) -> None:
        if not isinstance(self.prompt, str) and len(self.prompt) >= max_tokens:
            reason = f"prompt has {len(self.prompt)} token ids; at most {max_tokens - 1} are accepted"
            raise HttpError(400, reason, param="prompt")

    @property
    def input(self) -> Prompt:
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    renamed = MappingProxyType({"chat": "messages", "prompt": "messages", "logprobs": "top_logprobs"})
    prompt_field = "messages"
    # A request holds pages for all that it may say: the whole context for each chat would leave room for few.
    open_ended = 4096

    messages: Annotated[list[Message], FailFast()] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description=f"a list of 1 to {MAX_MESSAGES} messages with role and content",
    )
    max_completion_tokens: int | None = Field(default=None, description="an integer of at least 1")
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: int | None = Field(default=None, description="an integer")

    @model_validator(mode="after")
    def _of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is of use only with logprobs: true")
        return self

    @property
    def input(self) -> Prompt:
        return [{"role": message.role, "content": message.text} for message in self.messages]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def blame(self, error: InvalidRequest) -> HttpError:
        said = super().blame(error)
        if said.param == "max_tokens" and self.max_completion_tokens is not None:
            name = "max_completion_tokens"
            return HttpError(400, name + str(said).removeprefix("max_tokens"), param=name)
        return said


def read_request(
    kind: type[BodyT], data: bytes | bytearray, max_tokens: int
) -> tuple[BodyT, inference_pb2.GenerateRequest]:
    """The body without its prompt, and the gateway's request. max_tokens: of the longest prompt with its output.

    Raises HttpError, as read_body().
    """
    body = read_body(kind, data)
    body.check_length(max_tokens)
    try:
        return body.without_prompt(), body.request()
    except InvalidRequest as error:
        raise body.blame(error) from error


def read_body(kind: type[BodyT], data: bytes | bytearray) -> BodyT:
    """Raises HttpError, which names the field, the value and what would be accepted."""
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body is {reprlib.repr(values)}; a JSON object is accepted")
    if len(values) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(values)} fields; at most {MAX_FIELDS} are accepted")
    for name, accepted in ONLY.items():
        if name not in kind.model_fields:
            _check_unsupported(name, values.pop(name, None), accepted)
    for name in HARMLESS:
        values.pop(name, None)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error.errors()[0]) from None


def _check_unsupported(name: str, value: object, accepted: Sequence[object]) -> None:
    if value is not None and value not in accepted:
        values = " or ".join(map(json.dumps, [*accepted, None]))
        raise HttpError(400, f"{name} is {reprlib.repr(value)}; only {values} is accepted here", param=name)


def _refusal(kind: type[GenerationBody], finding: Any) -> HttpError:
    """The error for one of pydantic's findings: dotted field, value received and what would be accepted."""
    reason = finding["msg"].removeprefix("Value error, ")
    if not finding["loc"]:  # of the whole body: the message names its field itself
        return HttpError(400, reason, param=reason.partition(" ")[0])
    *place, last = finding["loc"]
    if finding["type"] == "extra_forbidden":
        near = difflib.get_close_matches(last[:LONGEST_NAME], kind.model_fields, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = f"; {hint}known: {', '.join([*kind.model_fields, *HARMLESS])}" if not place else ""
        name = _dotted([*place, last])[:LONGEST_NAME]
        return HttpError(400, f"unknown parameter {name}{known}", param=name, code="unknown_parameter")
    # Branches of a union stand in its place too, and mean nothing to a client.
    described = _descriptions(kind)
    names = [part for part in finding["loc"] if isinstance(part, int) or part in described]
    name, accepted = _dotted(names), described[next(part for part in reversed(names) if isinstance(part, str))]
    if finding["type"] == "value_error":
        return HttpError(400, f"{name} {reason}", param=name)
    received = "missing" if finding["type"] == "missing" else reprlib.repr(finding["input"])
    return HttpError(400, f"{name} is {received}; it must be {accepted}", param=name)


def _descriptions(kind: type[GenerationBody]) -> dict[str, str]:
    """What each field of a body and of its parts accepts."""
    parts = (Message, TextPart, StreamOptions, kind)
    return {name: field.description or "" for part in parts for name, field in part.model_fields.items()}


def _dotted(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
