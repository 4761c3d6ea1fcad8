"""/v1/completions: its body and its answer."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import FailFast, Field, field_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.answer import Answer, logprob_value
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.protocol import Prompt
from tandem.proto import inference_pb2

TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])


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


class CompletionAnswer(Answer):
    """To POST /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    _offset = 0  # characters of the tokens so far

    def _content(self, text: str, is_chunk: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
        names, values, tops, offsets = [], [], [], []
        for token in tokens:
            names.append(self._token(token.chosen.token_id))
            values.append(logprob_value(token.chosen))
            tops.append({self._token(other.token_id): logprob_value(other) for other in (*token.top, token.chosen)})
            offsets.append(self._offset)
            self._offset += len(names[-1])
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
