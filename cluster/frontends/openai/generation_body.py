"""The common part of bodies that ask for text."""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.guided_fields import GuidedFields
from tandem.cluster.frontends.openai.sampling_fields import MAX_LISTED, SAMPLING, SamplingFields
from tandem.cluster.protocol import TOKEN_IDS_ONLY, Prompt, accepted_value, build_request
from tandem.cluster.requests.cache_salt import MAX_CACHE_SALT
from tandem.cluster.requests.validation import MAX_REQUEST_ID
from tandem.proto import inference_pb2

SERVICE_TIER = "text: 'flex', 'priority' or another one, which changes nothing"
TOO_LONG = re.compile(
    r"takes at most (?P<most>\d+) and one output| of (?P<all>\d+) leaves at most|"
    r"which (?P<text>\d+) of the model's longest"
)
"""The validator's errors for a request that the context has no room for."""


def _biases(value: Any) -> Any:
    """JSON's keys are texts."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LISTED:
        raise ValueError(f"has {len(value)} token ids; it may have at most {MAX_LISTED}")
    wrong = next((key for key in value if not re.fullmatch("[0-9]{1,10}", key)), None)
    if wrong is not None:
        raise ValueError(f"has the key {wrong!r:.80}; each key must be a token id")
    return {int(key): bias for key, bias in value.items()}


LogitBias = Annotated[dict[int, float], BeforeValidator(_biases)]
IdList = TypeAliasType("IdList", Annotated[list[int], FailFast(), Field(max_length=MAX_LISTED)])
IdLists = TypeAliasType("IdLists", Annotated[list[IdList], FailFast(), Field(max_length=MAX_LISTED)])


class StreamOptions(BodyObject):
    """A whole answer has its usage anyway, so they change nothing there."""

    refused = frozenset()

    include_usage: bool = Field(default=False, description="true or false")
    continuous_usage_stats: bool = Field(default=False, description="true or false")


class Sliding(BodyObject):
    window: int = Field(description="an integer of at least 1")
    sinks: int = Field(default=0, description="an integer of at least 0, less than window")


class GenerationBody(GuidedFields, AskingBody, SamplingFields):
    """The common part of completions and chats. The request validator checks limits."""

    renamed: ClassVar[Mapping[str, str]]
    """This body's name for each field that the gateway's messages name otherwise."""
    prompt_field: ClassVar[str]
    """The field that may be large: see without_prompt()."""
    token_ids_only: ClassVar[str]
    """The text that replaces TOKEN_IDS_ONLY in this body's errors."""

    stream_options: StreamOptions | None = Field(
        default=None, description="an object with include_usage and continuous_usage_stats"
    )
    max_tokens: int | None = Field(default=None, description="an integer of at least 1")
    cache_salt: str | None = Field(
        default=None,
        max_length=MAX_CACHE_SALT,
        description=f"a text of at most {MAX_CACHE_SALT} characters",
    )
    logit_bias: LogitBias | None = Field(default=None, description="an object of token ids and numbers")
    bad_words_ids: IdLists | None = Field(default=None, description="a list of lists of token ids")
    n: int | None = Field(default=None, description=accepted_value("n"))
    best_of: int | None = Field(default=None, description=accepted_value("best_of"))
    prompt_logprobs: int | None = Field(default=None, description=accepted_value("prompt_logprobs"))
    sliding: Sliding | None = Field(default=None, description="an object with window and sinks")
    return_token_ids: bool = Field(default=False, description="true or false")
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    truncate_prompt_tokens: int | None = Field(default=None, description="an integer of at least 1, or -1")
    service_tier: str | None = Field(default=None, description=SERVICE_TIER)
    request_id: str | None = Field(
        default=None,
        max_length=MAX_REQUEST_ID,
        description=f"a text of at most {MAX_REQUEST_ID} characters that no running request has",
    )
    return_tokens_as_token_ids: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _ranks_no_stream(self) -> Self:
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise ValueError(f"best_of is {self.best_of}; with stream: true it must be n: {self.n or 1}")
        return self

    @property
    def num_answers(self) -> int:
        """The number of answers to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_usage(self) -> bool:
        """Returns whether each chunk has usage. As in vLLM, it takes include_usage, too."""
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def tells_prompt(self) -> bool:
        """Returns whether the answer needs the prompt's token ids, or their number."""
        return self.return_token_ids or self.tells_usage

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """See AskingBody."""
        given = {field.name: getattr(self, field.name) for field in SAMPLING}
        sampling = given | {"logprobs": self.num_logprobs, "max_tokens": self.most_tokens, "guided": self.guided}
        sampling |= {"logit_bias": self.logit_bias, "bad_words_ids": self.bad_words_ids}
        sampling["prompt_logprobs"] = self.num_prompt_logprobs
        sampling["sliding"] = None if self.sliding is None else self.sliding.model_dump()
        sampling |= {"add_special_tokens": self.add_special_tokens, "return_prompt_token_ids": self.tells_prompt}
        sampling["truncate_prompt_tokens"] = self.truncate_prompt_tokens
        sampling["service_tier"] = None if given["priority"] is not None else self.service_tier
        given = {name: value for name, value in sampling.items() if value is not None} | self.halves
        if -(2**63) <= given.get("seed", 0) < 0:  # a signed one
            given["seed"] += 2**64
        prompts = self.prompts
        name = self.request_id if len(prompts) == 1 else None  # each prompt is a request of its own
        if "encoder_prompt" in self.halves:
            return [build_request(None, given, name, self.cache_salt or "")]
        return [build_request(prompt, given, name, self.cache_salt or "") for prompt in prompts]

    def without_prompt(self) -> Self:
        """See AskingBody."""
        return self.model_copy(update={self.prompt_field: None, "stop": None, "stop_token_ids": None})

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt]: ...

    @property
    def halves(self) -> dict[str, Any]:
        """Returns encoder_prompt and decoder_prompt, as far as they are given."""
        return {}

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The value for SamplingParams.prompt_logprobs."""
        return self.prompt_logprobs

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    def blame(self, error: InvalidRequest) -> HttpError:
        """See AskingBody."""
        long = TOO_LONG.search(str(error))
        if long is not None:
            longest = int(long["most"]) + 1 if long["most"] else int(long["all"] or long["text"])
            return too_long(longest, self._in_own_words(error))
        return self._in_own_words(error)

    def _in_own_words(self, error: InvalidRequest) -> HttpError:
        said = str(error).replace(TOKEN_IDS_ONLY, self.token_ids_only)
        found = re.match(r"(?:sampling\.|chat\.)?(\w+)", said)
        name = found[1] if found else ""
        param = self.guide if name == "guided" else self.renamed.get(name, name)
        if found is None or param not in type(self).model_fields:
            return HttpError(400, said)
        return HttpError(400, param + said[found.end() :], param=param)


def too_long(max_tokens: int, error: HttpError) -> HttpError:
    """Makes the error for a request that is longer than max_tokens, in OpenAI's words: clients look for them and for
    the code."""
    message = f"This model's maximum context length is {max_tokens} tokens. However, {error}"
    return HttpError(400, message, param=error.param, code="context_length_exceeded")
