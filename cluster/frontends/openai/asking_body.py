"""Bodies that ask for text, of any API."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from pydantic import Field, PrivateAttr

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.other_fields import ignored_header
from tandem.proto import inference_pb2


class AskingBody(BodyObject, ABC):
    """The body that GenerationRoute reads. The request validator checks limits."""

    open_ended: ClassVar[int | None] = None
    """See RequestValidator.validate."""

    model: str | None = Field(default=None, description="the served model's name")
    stream: bool = Field(default=False, description="true or false")

    _headers: dict[str, str] = PrivateAttr(default_factory=dict)

    def ignoring(self, names: list[str]) -> Self:
        """Returns this body, which came with other fields that are ignored."""
        self._headers = ignored_header(names)
        return self

    @property
    def headers(self) -> dict[str, str]:
        """Returns the headers of the answer."""
        return self._headers

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return 1

    @property
    def num_logprobs(self) -> int | None:
        """The value for SamplingParams.logprobs."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The value for SamplingParams.prompt_logprobs."""
        return None

    def check_length(self, max_tokens: int) -> None:
        """Refuses a prompt whose length is known and that no request of so many tokens has room for, before it
        travels. Raises HttpError."""

    @abstractmethod
    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """The gateway's requests, one for each prompt. Raises InvalidRequest, with the gateway's names: see blame()."""

    @abstractmethod
    def without_prompt(self) -> Self:
        """Returns the body as far as its answer needs it, once there are requests()."""

    @abstractmethod
    def blame(self, error: InvalidRequest) -> HttpError:
        """Returns the gateway's refusal in the words of this body."""
