"""/v1/score and /v1/rerank, with the names of vLLM, Jina and Cohere."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.embedding.body_route import BodyRoute, own_request_id, usage_of
from tandem.cluster.frontends.embedding.embeddings import blame
from tandem.cluster.frontends.embedding.read_fields import Ignored, ReadFields, read_fields
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.requests.embedding.embeddings import Caller
from tandem.cluster.requests.embedding.scoring import Pairs


class TextDocument(BodyObject):
    """A document as Jina and Cohere have it."""

    text: str = Field(description="text")


ScoreTexts = TypeAliasType("ScoreTexts", Annotated[list[str], FailFast(), Field(min_length=1)])
Documents = TypeAliasType("Documents", Annotated[list[str | TextDocument], FailFast(), Field(min_length=1)])
INSTRUCTION = Field(default=None, description="text that says what a good document is")


class ScoreBody(ReadFields):
    """POST /v1/score."""

    text_1: str | ScoreTexts | None = Field(default=None, description="text, or a list of texts")
    text_2: str | ScoreTexts | None = Field(default=None, description="text, or a list of texts")
    queries: str | ScoreTexts | None = Field(default=None, description="as text_1")
    documents: str | ScoreTexts | None = Field(default=None, description="as text_2")
    instruction: str | None = INSTRUCTION

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Raises HttpError."""
        first = self._one("text_1", self.text_1, "queries", self.queries)
        second = self._one("text_2", self.text_2, "documents", self.documents)
        if len(first) not in (1, len(second)):
            reason = (
                f"text_1 has {len(first)} texts and text_2 {len(second)}; text_1 must have as many as text_2, or one"
            )
            raise HttpError(400, reason, param="text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    @staticmethod
    def _one(name: str, given: str | list[str] | None, other: str, same: str | list[str] | None) -> list[str]:
        if (given is None) == (same is None):
            raise HttpError(400, f"{name} and {other} are there, or neither is; give one of them", param=name)
        texts: Any = same if given is None else given
        return [texts] if isinstance(texts, str) else texts


class RerankBody(ReadFields):
    """POST /v1/rerank."""

    query: str = Field(description="text")
    documents: Documents = Field(description="a list of texts, or of objects with a text")
    top_n: int | None = Field(default=None, ge=0, description="an integer of at least 0")
    return_documents: bool = Field(default=True, description="true or false")
    max_tokens_per_doc: int | None = Field(default=None, ge=1, lt=1 << 31, description="an integer of at least 1")
    instruction: str | None = INSTRUCTION

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


class AskedScores(NamedTuple):
    """The scores that a body asks for."""

    pairs: Pairs


class AskedRanking(NamedTuple):
    """The ranking that a body asks for."""

    pairs: Pairs
    top_n: int
    returns: bool  # the documents


def read_scores(data: bytes | bytearray, names: tuple[str, ...]) -> tuple[AskedScores, Ignored]:
    """See body_route.Read."""
    body, ignored = read_fields(ScoreBody, data, names)
    return AskedScores(_pairs(body, body.pairs, body.instruction)), ignored


def read_ranking(data: bytes | bytearray, names: tuple[str, ...]) -> tuple[AskedRanking, Ignored]:
    """See body_route.Read."""
    body, ignored = read_fields(RerankBody, data, names)
    texts = [(body.query, one) for one in body.texts]
    pairs = _pairs(body, texts, body.instruction)._replace(document_tokens=body.max_tokens_per_doc)
    top_n = min(body.top_n or len(texts), len(texts))  # in vLLM 0 means all documents
    return AskedRanking(pairs, top_n, body.return_documents), ignored


def _pairs(body: ReadFields, texts: list[tuple[str, str]], instruction: str | None) -> Pairs:
    return Pairs(texts, instruction, body.truncate_prompt_tokens, **body.turn)


@dataclass(frozen=True)
class RerankRoutes:
    """Both routes."""

    route: BodyRoute

    async def score(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """/v1/score."""
        await self.route.serve(read_scores, partial(self._scores, reply), scope, receive, reply)

    async def rerank(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """/v1/rerank."""
        await self.route.serve(read_ranking, partial(self._ranking, reply), scope, receive, reply)

    async def _scores(self, reply: Reply, asked: AskedScores, caller: Caller) -> None:
        try:
            request_id, answer = await self.route.embeddings.score(asked.pairs, caller, own_request_id())
        except InvalidRequest as error:
            raise blame(error, {"documents": "text_2"}) from error
        scores = [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(answer.values.tolist())
        ]
        whole = {"object": "list", "data": scores, "usage": usage_of(answer)}
        await reply.whole(200, {**self.route.frame("score", request_id), **whole})

    async def _ranking(self, reply: Reply, asked: AskedRanking, caller: Caller) -> None:
        try:
            request_id, answer = await self.route.embeddings.score(asked.pairs, caller, own_request_id())
        except InvalidRequest as error:
            raise blame(error, {"documents": "documents"}) from error
        scores = answer.values.tolist()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": {"text": asked.pairs.texts[index][1]}} if asked.returns else {}),
            }
            for index in best
        ]
        await reply.whole(
            200, {**self.route.frame("rerank", request_id), "results": results, "usage": usage_of(answer)}
        )
