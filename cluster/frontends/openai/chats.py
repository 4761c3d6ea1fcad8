"""/v1/chat/completions: its body."""

import json
from types import MappingProxyType
from typing import Any, Self

from pydantic import Field, model_validator

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.messages import MESSAGES, Messages
from tandem.cluster.frontends.openai.tool_fields import ToolFields
from tandem.cluster.protocol import Prompt
from tandem.proto import inference_pb2


class ChatBody(ToolFields, GenerationBody):
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
    token_ids_only = "the checkpoint has no tokenizer.json; /v1/completions accepts a list of token ids as its prompt"
    # A request holds pages for all that it may say: the whole context for each chat would leave room for few.
    open_ended = 4096

    messages: Messages = Field(description=MESSAGES)
    max_completion_tokens: int | None = Field(default=None, description="an integer of at least 1")
    logprobs: bool = Field(default=False, description="true or false")
    top_logprobs: int | None = Field(default=None, description="an integer")

    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="an object")
    reasoning_effort: str | None = Field(default=None, description="text")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    continue_final_message: bool = Field(default=False, description="true or false")
    include_reasoning: bool = Field(default=True, description="true or false")

    @model_validator(mode="after")
    def _of_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is of use only with logprobs: true")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return [[message.turn for message in self.messages]]

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        requests = super().requests()
        chat = requests[0].chat
        chat.continue_final_message = self.continue_final_message
        if self.add_generation_prompt is not None:
            chat.add_generation_prompt = self.add_generation_prompt
        if self.template_kwargs:
            chat.template_kwargs = json.dumps(self.template_kwargs)
        chat.tools = self.template_tools
        return requests

    def _guides(self) -> list[tuple[str, dict[str, Any]]]:
        forced = self.tool_guide
        return super()._guides() + ([] if forced is None else [("tool_choice", forced)])

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template. Some templates know reasoning_effort, and some whether to think."""
        effort = self.reasoning_effort
        made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        return made | ({"enable_thinking": False} if effort == "none" else {}) | (self.chat_template_kwargs or {})

    @property
    def begins(self) -> bool:
        """Returns whether the prompt ends with the beginning of an answer."""
        return self.add_generation_prompt is not False and not self.continue_final_message

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
