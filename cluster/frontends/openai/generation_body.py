"""The common part of bodies that ask for text."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.frontends.openai.sampling_fields import SAMPLING, SamplingFields
from tandem.cluster.protocol import Prompt, accepted_value, build_request
from tandem.cluster.requests.cache_salt import MAX_CACHE_SALT
from tandem.proto import inference_pb2


class StreamOptions(Part):
    include_usage: bool = Field(default=False, description="true or false")


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
    n: int | None = Field(default=None, description=accepted_value("n"))
    best_of: int | None = Field(default=None, description=accepted_value("best_of"))
    return_token_ids: bool = Field(default=False, description="true or false")
    return_tokens_as_token_ids: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is of use only with stream: true")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise ValueError(f"best_of is {self.best_of}; with stream: true n is accepted: {self.n or 1}")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """The gateway's requests, one for each prompt. Raises InvalidRequest, with the gateway's names: see blame()."""
        given = {field.name: getattr(self, field.name) for field in SAMPLING}
        sampling = given | {"logprobs": self.num_logprobs, "max_tokens": self.most_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        return [build_request(prompt, given, None, self.cache_salt or "") for prompt in self.prompts]

    def check_length(self, max_tokens: int) -> None:
        """Refuses a prompt whose length is known and that no request of so many tokens has room for, before it
        travels. Raises HttpError."""

    def without_prompt(self) -> Self:
        """The body as far as its answer needs it, once there is a request()."""
        return self.model_copy(update={self.prompt_field: None, "stop": None, "stop_token_ids": None})

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]: ...

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
