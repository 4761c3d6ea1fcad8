"""The routes of OpenAI's and Anthropic's APIs."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from tandem import __version__
from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.frontends.adapters.changes import AdapterChanges
from tandem.cluster.frontends.adapters.routes import AdapterRoutes, LoadBody, UnloadBody
from tandem.cluster.frontends.anthropic.answer import MessagesErrors, messages_answer
from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.anthropic.count import CountBody, read_count
from tandem.cluster.frontends.embedding.body_route import BodyRoute
from tandem.cluster.frontends.embedding.embeddings import EmbeddingBody, EmbeddingRoute
from tandem.cluster.frontends.embedding.rerank import RerankBody, RerankRoutes, ScoreBody
from tandem.cluster.frontends.http.app import NAMED, Route, Routes
from tandem.cluster.frontends.http.monitoring import READS
from tandem.cluster.frontends.http.reply import ErrorForm, Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.chat_answer import ChatAnswers
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody, completion_answer
from tandem.cluster.frontends.openai.generation_route import GenerationRoute
from tandem.cluster.frontends.openai.models import MODELS, Models
from tandem.cluster.frontends.openai.openapi import OPENAPI, OpenApi
from tandem.cluster.frontends.openai.tokenization import DetokenizeBody, Tokenization, TokenizeBody
from tandem.cluster.frontends.responses.answer import ResponsesErrors, responses_answer
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.embedding.embeddings import Embeddings
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.text.parsers.formats import OutputFormats
from tandem.cluster.text.tokenizer import Tokenizer

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"  # as in vLLM
OPERATORS = frozenset({LOAD, UNLOAD})
"""Paths that no caller's key opens."""
EMBEDDINGS = "/v1/embeddings"
SCORES = ("/v1/score", "/score")  # as in vLLM
RERANKS = ("/v1/rerank", "/v2/rerank", "/rerank")
ERROR_FORMS: Mapping[str, ErrorForm] = MappingProxyType(
    {"/v1/responses": ResponsesErrors(), MESSAGES: MessagesErrors(), COUNT_TOKENS: MessagesErrors()}
)
"""The error forms of paths whose errors differ from OpenAI's older ones."""

BODIES: Mapping[str, type[BodyObject]] = MappingProxyType(
    {
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
        "/v1/responses": ResponsesBody,
        MESSAGES: MessagesBody,
        COUNT_TOKENS: CountBody,
        EMBEDDINGS: EmbeddingBody,
        **dict.fromkeys(SCORES, ScoreBody),
        **dict.fromkeys(RERANKS, RerankBody),
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
        LOAD: LoadBody,
        UNLOAD: UnloadBody,
    }
)
"""The bodies of the routes, for /openapi.json."""

REQUESTS_A_ROUND = 8  # each takes a fifth of a millisecond, until its workers are asked


def api_routes(
    requests: ActiveRequests,
    tokenizer: Tokenizer | None,
    formats: OutputFormats,
    *,
    names: ServedNames,
    root: str,
    max_model_len: int,
    quantization: str,
    max_bytes: int,
    bodies: BodyBudget,
    readers: Readers,
    changes: AdapterChanges,
    embeddings: Embeddings,
    beside: Routes | None = None,
) -> Routes:
    """Both APIs. formats: of the checkpoint's answers. names: that a body may give as its model. root: where the
    checkpoint is. quantization: see ServedModel. max_bytes: of one body. bodies: counts them. readers: read long ones.
    changes: of LoRA adapters. embeddings: of prompts that nobody decodes. beside: routes that /openapi.json describes,
    too."""
    models = Models(names, root, max_model_len, quantization)
    turns = FairTurns(REQUESTS_A_ROUND)
    shared = requests, names, max_bytes, max_model_len, turns, bodies, readers
    completions = GenerationRoute(CompletionBody, partial(completion_answer, tokenizer), *shared)
    answers = ChatAnswers(tokenizer, formats)
    chats = GenerationRoute(ChatBody, answers.make, *shared)
    responses = GenerationRoute(ResponsesBody, partial(responses_answer, answers), *shared)
    messages = GenerationRoute(MessagesBody, partial(messages_answer, answers), *shared)
    tokenization = Tokenization(tokenizer, names, max_bytes, max_model_len, bodies, readers)
    adapters = AdapterRoutes(changes, bodies)
    reading = BodyRoute(embeddings, names.model, max_bytes, bodies, readers)
    embedding, reranking = EmbeddingRoute(reading), RerankRoutes(reading)
    routes: Routes = {
        MODELS: (READS, models.list),
        f"{MODELS}{NAMED}": (READS, models.one),
        "/v1/completions": (("POST",), completions.serve),
        "/v1/chat/completions": (("POST",), chats.serve),
        "/v1/responses": (("POST",), responses.serve),
        MESSAGES: (("POST",), messages.serve),
        EMBEDDINGS: (("POST",), embedding.serve),
        **{path: (("POST",), reranking.score) for path in SCORES},
        **{path: (("POST",), reranking.rerank) for path in RERANKS},
        COUNT_TOKENS: (("POST",), partial(tokenization.count, read_count)),
        "/tokenize": (("POST",), tokenization.tokenize),
        "/detokenize": (("POST",), tokenization.detokenize),
        LOAD: (("POST",), adapters.load),
        UNLOAD: (("POST",), adapters.unload),
        "/version": (READS, _constant({"version": __version__})),
    }
    routes[OPENAPI] = (READS, OpenApi(routes, beside or {}, BODIES).serve)
    return routes


def _constant(value: object) -> Route:
    async def route(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.whole(200, value)

    return route
