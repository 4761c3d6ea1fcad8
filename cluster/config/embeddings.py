"""The section of a cluster's configuration that says what embeddings and scores are."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tandem.cluster.config.units import Inputs, Section, Tokens

PLACES = ("{query}", "{document}")  # of score_template; {instruction} may be there, too


ScoreTokens = Annotated[list[str], Field(min_length=2, max_length=2, json_schema_extra={"accepted": "two texts"})]


def _has_places(template: str) -> str:
    """Checks the template's placeholders. {document} comes last, because a document may be cut."""
    wrong = [place for place in PLACES if template.count(place) != 1]
    if wrong or template.index("{document}") < max(map(template.find, ("{query}", "{instruction}"))):
        raise ValueError("must have {query} and, behind it, {document} once each; {instruction} may stand before both")
    return template


class EmbeddingsSection(Section):
    pooling: Literal["auto", "last", "mean"] = "auto"
    """the hidden states that become an embedding: the last token's, or the mean of all; auto follows the checkpoint's
    files for sentence-transformers, and is last without them"""
    normalize: bool | None = None
    """whether embeddings have length 1; null follows the checkpoint's files, and is true without them. Requests may
    override it"""
    max_inputs: Inputs = Field(default=2048, le=1 << 16)
    """most inputs of a request"""
    max_tokens: Tokens = Field(default=1 << 20, le=1 << 31)
    """most tokens of all inputs of a request"""
    score_template: Annotated[str, AfterValidator(_has_places)] | None = None
    """the prompt of /v1/score and /v1/rerank, with {query}, {document} and {instruction}; null is Qwen3-Reranker's"""
    score_instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    """{instruction} for requests without one"""
    score_tokens: ScoreTokens = Field(default=["yes", "no"])
    """the two tokens that a score compares, one for a good pair and one for a bad pair. The score is the first token's
    probability among the two"""
