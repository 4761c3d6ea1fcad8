"""/v1/completions: its body and its answer."""

from collections.abc import Sequence
from io import StringIO
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Discriminator, FailFast, Field, Tag, field_validator, model_validator
from typing_extensions import TypeAliasType

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.json_blocks import JsonList
from tandem.cluster.frontends.openai.answer import Answer, logprob_value, token_name
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.generation_body import GenerationBody, too_long
from tandem.cluster.protocol import WrittenPrompt
from tandem.cluster.text.token_offsets import TokenOffsets
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.sampling.sampling_params import MAX_ANSWERS

PART = "bytes:"  # begins the name of a token that is a part of a character, as OpenAI's API has it
TokenIds = TypeAliasType("TokenIds", Annotated[list[int], FailFast()])
Text = Annotated[str, Tag("one-text")]
Ids = Annotated[TokenIds, Tag("one-ids")]
TextList = TypeAliasType("TextList", Annotated[list[str], FailFast(), Field(max_length=MAX_ANSWERS)])
IdsList = TypeAliasType("IdsList", Annotated[list[TokenIds], FailFast(), Field(max_length=MAX_ANSWERS)])
Texts = Annotated[TextList, Tag("texts")]
IdLists = Annotated[IdsList, Tag("lists")]
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of logprobs


def _kind(prompt: object) -> str:
    """Returns the kind of a prompt, by its first entry."""
    if not isinstance(prompt, list):
        return "one-text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "one-ids"


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    renamed = MappingProxyType({"text": "prompt", "token_bytes": "prompt"})
    prompt_field = "prompt"
    token_ids_only = "the checkpoint has no tokenizer.json; send a list of token ids"

    prompt: Text | Ids | Texts | IdLists = Field(
        discriminator=Discriminator(_kind),
        description=f"text, a list of token ids, or a list of 1 to {MAX_ANSWERS} of either",
    )
    encoder_prompt: str | TokenIds | None = Field(default=None, description="text or a list of token ids")
    decoder_prompt: str | TokenIds | None = Field(default=None, description="text or a list of token ids")
    logprobs: int | None = Field(default=None, description="an integer")
    echo: bool = Field(default=False, description="true or false")

    @model_validator(mode="before")
    @classmethod
    def _encoder_prompt(cls, body: Any) -> Any:
        """Takes encoder_prompt in place of `prompt`."""
        if not isinstance(body, dict) or body.get("encoder_prompt") is None:
            return body
        if body.get("prompt") is not None:
            raise ValueError("encoder_prompt and prompt are both set; set only one")
        return body | {"prompt": body["encoder_prompt"]}

    @field_validator("prompt", mode="before")
    @classmethod
    def _not_empty(cls, prompt: object) -> object:
        if prompt in ([], [[]]):
            raise ValueError("is empty; at least one token id is needed")
        return prompt

    @model_validator(mode="after")
    def _number(self) -> Self:
        prompts, answers = len(self.prompts), max(self.n or 1, self.best_of or 1)
        if prompts > 1 and prompts * answers > MAX_ANSWERS:
            raise ValueError(
                f"prompt has {prompts} entries, with {answers} answers each; at most {MAX_ANSWERS} answers are allowed"
            )
        return self

    @model_validator(mode="after")
    def _echoes(self) -> Self:
        if self.echo and max(self.n or 1, self.best_of or 1) > 1:
            raise ValueError("echo is true; with n or best_of above 1 it must be false")
        if self.echo and (self.encoder_prompt is not None or self.decoder_prompt is not None):
            raise ValueError("echo is true; with encoder_prompt or decoder_prompt it must be false")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise ValueError("echo is true; with truncate_prompt_tokens it must be false")
        return self

    def without_prompt(self) -> Self:
        short = super().without_prompt()
        return short.model_copy(update={"prompt": self.prompt}) if self.echo else short

    def check_length(self, max_tokens: int) -> None:
        for index, prompt in enumerate(self.prompts):
            if isinstance(prompt, str) or 0 < len(prompt) < max_tokens:
                continue
            if prompt and self.truncate_prompt_tokens is not None:
                continue
            name = f"prompt[{index}]" if len(self.prompts) > 1 else "prompt"
            reason = f"{name} has {len(prompt)} token ids; it must have from 1 to {max_tokens - 1}"
            error = HttpError(400, reason, param="prompt")
            raise too_long(max_tokens, error) if prompt else error

    @property
    def halves(self) -> dict[str, Any]:
        given = {"encoder_prompt": self.encoder_prompt, "decoder_prompt": self.decoder_prompt}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def prompts(self) -> list[WrittenPrompt]:
        given: Any = self.prompt
        return given if _kind(given) in ("texts", "lists") else [given]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        least = 0 if self.max_tokens == 0 else None  # else nothing could be asked of the workers
        echoed = (self.logprobs, least) if self.echo else ()
        return max((one for one in (self.prompt_logprobs, *echoed) if one is not None), default=None)


async def completion_answer(
    tokenizer: Tokenizer | None, model: str, body: AskingBody, requests: list[inference_pb2.GenerateRequest]
) -> "CompletionAnswer":
    """Makes the answer to a completion. model: the name to answer with."""
    assert isinstance(body, CompletionBody)
    return CompletionAnswer(body, model, tokenizer)


class CompletionAnswer(Answer):
    """The answer to POST /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _begin(self) -> None:
        super()._begin()
        body = self._body
        assert isinstance(body, CompletionBody)
        self._completion = body
        self._echoes = body.echo  # still
        self._echoed = ""  # the prompt's text, once it is known
        self._text = StringIO(newline="")  # of no chunk yet
        self._columns: list[JsonList] = []  # the same, as COLUMNS
        self._prompt_offsets: TokenOffsets | None = None  # once the prompt has begun
        self._offsets: TokenOffsets | None = None  # the same, of the output

    def keep(self, message: inference_pb2.GenerateResponse) -> None:
        """Keeps a message. An echoed prompt stands in the whole choice, or in its first chunk."""
        if self._completion.echo and not self._echoed:
            self._echoed = self._prompt_text(self._completion.prompts[message.index])
        if self._completion.echo and self._completion.logprobs is not None:
            self._keep_echoed(message)
        super().keep(message)

    def _keep_echoed(self, message: inference_pb2.GenerateResponse) -> None:
        """Keeps the echoed prompt. Nothing precedes its first token, which has no log-probabilities."""
        tokens, most = message.prompt_logprobs, self._completion.logprobs or 0
        if self._prompt_offsets is None:
            self._prompt_offsets = TokenOffsets(self._texts, text=self._echoed)
        if tokens and not tokens[0].HasField("chosen"):
            first = self._first_token(self._completion.prompts[message.index])
            self._add_columns(([self._name(first)], [None], [None], [self._prompt_offsets.next(first)]))
        scored = [token for token in tokens if token.HasField("chosen")]
        shown = [inference_pb2.TokenLogprobs(chosen=one.chosen, top=one.top[:most]) for one in scored]
        self._add_tokens(shown, self._prompt_offsets)

    def _first_token(self, prompt: WrittenPrompt) -> int:
        if isinstance(prompt, str):
            assert self._texts is not None, "a text was refused without a tokenizer"
            special = self._body.add_special_tokens is not False
            return self._texts.encode(prompt, add_special_tokens=special)[0]
        (first, *_) = prompt
        assert isinstance(first, int)
        return first

    def _prompt_text(self, prompt: WrittenPrompt) -> str:
        if isinstance(prompt, str):
            return prompt
        ids = [token for token in prompt if isinstance(token, int)]
        return "" if self._texts is None else self._texts.decode(ids)

    def _keep_content(self, message: inference_pb2.GenerateResponse) -> None:
        self._text.write(message.text)

    def _take_content(self, is_chunk: bool) -> dict[str, Any]:
        text, self._text = self._text.getvalue(), StringIO(newline="")
        echoed, self._echoes = self._echoed if self._echoes else "", False
        return {"text": echoed + text}

    def _keep_logprobs(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> None:
        if self._offsets is None:
            skips = self._body.skip_special_tokens is not False
            self._offsets = TokenOffsets(self._texts, begin=len(self._echoed), skip_special_tokens=skips)
        self._add_tokens(tokens, self._offsets)

    def _add_tokens(self, tokens: Sequence[inference_pb2.TokenLogprobs], offsets: TokenOffsets) -> None:
        names, values, tops, places = [], [], [], []
        for token in tokens:
            names.append(self._name(token.chosen.token_id))
            values.append(logprob_value(token.chosen))
            tops.append(self._alternatives(token))
            places.append(offsets.next(token.chosen.token_id))
        self._add_columns((names, values, tops, places))

    def _alternatives(self, token: inference_pb2.TokenLogprobs) -> dict[str, float]:
        """Returns log-probabilities by tokens' names. If two tokens have the same text, the chosen one keeps it, or
        else the likelier."""
        ids: dict[str, int] = {}
        for one in (token.chosen, *token.top):
            name = self._name(one.token_id)
            ids[name if ids.get(name, one.token_id) == one.token_id else token_name(one.token_id, None)] = one.token_id
        names = {token_id: name for name, token_id in ids.items()}
        return {names[one.token_id]: logprob_value(one) for one in (*token.top, token.chosen)}

    def _name(self, token_id: int) -> str:
        return token_name(token_id, self._tokenizer, PART)

    def _add_columns(self, entries: Sequence[Sequence[object]]) -> None:
        if not self._columns:
            self._columns = [JsonList() for _ in COLUMNS]
        for column, more in zip(self._columns, entries, strict=True):
            column.extend(more)

    def _take_logprobs(self) -> dict[str, Any]:
        self._add_columns([()] * len(COLUMNS))
        taken, self._columns = self._columns, []
        return dict(zip(COLUMNS, taken, strict=True))
