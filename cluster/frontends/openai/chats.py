"""/v1/chat/completions: its body and its answer."""

import json
from collections.abc import Iterable
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.answer import Answer, logprob_value
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.protocol import MAX_MESSAGES, Prompt
from tandem.cluster.text.tokenizer import REPLACEMENT
from tandem.proto import inference_pb2


class TextPart(Part):
    type: Literal["text"] = Field(description="'text'")
    text: str = Field(description="text")


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast()])


class Message(Part):
    refused = frozenset({"audio", "function_call", "tool_call_id", "tool_calls"})

    role: str = Field(description="text")
    content: str | Parts = Field(description="text, or a list of parts of type text")

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


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    renamed = MappingProxyType(
        {
            "chat": "messages",
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "template_kwargs": "chat_template_kwargs",
        }
    )
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

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="an object")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    continue_final_message: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is of use only with logprobs: true")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return [[{"role": message.role, "content": message.text} for message in self.messages]]

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        requests = super().requests()
        chat = requests[0].chat
        chat.continue_final_message = self.continue_final_message
        if self.add_generation_prompt is not None:
            chat.add_generation_prompt = self.add_generation_prompt
        if self.chat_template_kwargs:
            chat.template_kwargs = json.dumps(self.chat_template_kwargs)
        return requests

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _in_own_words(self, error: InvalidRequest) -> HttpError:
        said = super()._in_own_words(error)
        if said.param == "max_tokens" and self.max_completion_tokens is not None:
            name = "max_completion_tokens"
            return HttpError(400, name + str(said).removeprefix("max_tokens"), param=name)
        return said


class ChatAnswer(Answer):
    """To POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _begun = False

    def _object(self, kind: str, request_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chat has one prompt, whose tokens stand beside the choices, as in vLLM."""
        prompts = [choice.pop("prompt_token_ids") for choice in choices if "prompt_token_ids" in choice]
        return super()._object(kind, request_id, choices) | ({"prompt_token_ids": prompts[0]} if prompts else {})

    def _content(self, text: str, is_chunk: bool) -> dict[str, Any]:
        if not is_chunk:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return {"delta": role | {"content": text}}

    def _logprobs(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(token.chosen) | {"top_logprobs": [self._entry(other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: inference_pb2.TokenLogprob) -> dict[str, Any]:
        """bytes is null for a token that is only a part of a character."""
        text = self._token(token.token_id)
        encoded = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": logprob_value(token), "bytes": encoded}
