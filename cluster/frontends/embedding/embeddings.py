"""/v1/embeddings, as OpenAI has it, with vLLM's fields and the names of a checkpoint's prompts."""

import asyncio
import base64
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, FailFast, Field, Tag
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest, UnknownModel
from tandem.cluster.frontends.embedding.body_route import BodyRoute, own_request_id, usage_of
from tandem.cluster.frontends.embedding.read_fields import Ignored, ReadFields, read_fields
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.requests.cache_salt import MAX_CACHE_SALT
from tandem.cluster.requests.embedding.embeddings import Caller
from tandem.cluster.requests.embedding.reading import Values
from tandem.proto import inference_pb2
from tandem.workers.wire.messages import prompt_to_bytes

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Ids = TypeAliasType("Ids", Annotated[list[TokenId], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
IdLists = TypeAliasType("IdLists", Annotated[list[Ids], FailFast()])
PARAMS = {"inputs": "input", "dimensions": "dimensions", "prompt": "prompt", "prompt_name": "prompt_name"}


def _kind(given: object) -> str:
    """Returns the kind of an input, by its first entry."""
    if not isinstance(given, list):
        return "one-text"
    first = given[0] if given else None
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "one-ids"


class EmbeddingBody(ReadFields):
    """POST /v1/embeddings."""

    input: (
        Annotated[str, Tag("one-text")]
        | Annotated[Ids, Tag("one-ids")]
        | Annotated[Texts, Tag("texts")]
        | Annotated[IdLists, Tag("lists")]
    ) = Field(
        discriminator=Discriminator(_kind),
        description="text, a list of token ids, or a list of either",
    )
    encoding_format: Literal["float", "base64"] = Field(default="float", description="'float' or 'base64'")
    dimensions: int | None = Field(default=None, ge=1, lt=1 << 31, description="an integer of at least 1")
    normalize: bool | None = Field(default=None, description="true or false")
    prompt_name: str | None = Field(default=None, description="the name of one of the checkpoint's prompts")
    prompt: str | None = Field(default=None, description="text that goes before each text")
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    cache_salt: str | None = Field(
        default=None, max_length=MAX_CACHE_SALT, description=f"text of at most {MAX_CACHE_SALT} characters"
    )

    @property
    def inputs(self) -> list[inference_pb2.Prompt]:
        given: Any = self.input
        many = given if _kind(given) in ("texts", "lists") else [given]
        return [
            inference_pb2.Prompt(text=one)
            if isinstance(one, str)
            else inference_pb2.Prompt(token_bytes=prompt_to_bytes(one))
            for one in many
        ]

    @property
    def request(self) -> inference_pb2.EmbedRequest:
        """Returns the gateway's request."""
        same = ("dimensions", "normalize", "prompt_name", "prompt", "truncate_prompt_tokens", "add_special_tokens")
        options = {name: value for name in same if (value := getattr(self, name)) is not None}
        return inference_pb2.EmbedRequest(inputs=self.inputs, cache_salt=self.cache_salt or "", **self.turn, **options)


class AskedEmbeddings(NamedTuple):
    """The embeddings that a body asks for."""

    request: inference_pb2.EmbedRequest
    is_base64: bool


def read_embeddings(data: bytes | bytearray, names: tuple[str, ...]) -> tuple[AskedEmbeddings, Ignored]:
    """See body_route.Read."""
    body, ignored = read_fields(EmbeddingBody, data, names)
    if body.input in ([], [[]]):
        raise HttpError(400, "input is empty; at least one text or token id is needed", param="input")
    try:
        return AskedEmbeddings(body.request, body.encoding_format == "base64"), ignored
    except (ValueError, OverflowError) as error:  # a text that is no Unicode
        raise HttpError(400, f"input cannot be sent on: {error}", param="input") from None


@dataclass(frozen=True)
class EmbeddingRoute:
    """The route."""

    route: BodyRoute

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers one request."""
        await self.route.serve(read_embeddings, partial(self._answer, reply), scope, receive, reply)

    async def _answer(self, reply: Reply, asked: AskedEmbeddings, caller: Caller) -> None:
        request, embeddings = asked.request, self.route.embeddings
        request.request_id = own_request_id()
        try:
            with embeddings.embedding_room(len(request.inputs), request.dimensions or None):
                request_id, answer = await embeddings.embed(request, caller)
                entries = await asyncio.to_thread(_entries, answer.values, asked.is_base64)
                data = {"object": "list", "data": entries, "usage": usage_of(answer)}
                await reply.whole(200, {**self.route.frame("embd", request_id), **data})
        except InvalidRequest as error:
            raise blame(error, PARAMS) from error


def _entries(values: Values, is_base64: bool) -> list[dict[str, Any]]:
    rows = values.astype("<f4", copy=False)
    return [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.tobytes()).decode() if is_base64 else row,
        }
        for index, row in enumerate(rows)
    ]


def blame(error: InvalidRequest, names: dict[str, str]) -> HttpError:
    """Returns the gateway's refusal in the body's words. names: the body's fields by the gateway's names."""
    if isinstance(error, UnknownModel):
        return HttpError.of(error)
    text = str(error)
    for own, name in names.items():
        rest = text.removeprefix(own)
        if rest != text and not rest[:1].isalnum() and rest[:1] != "_":
            return HttpError(400, name + rest, param=name)
    return HttpError(400, text)
