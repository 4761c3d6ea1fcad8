"""The routes of OpenAI's and Anthropic's APIs."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

from tandem import __version__
from tandem.cluster.frontends.anthropic.answer import MessagesErrors, messages_answer
from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.anthropic.count import CountBody, read_count
from tandem.cluster.frontends.http.app import MODELS, Route, Routes
from tandem.cluster.frontends.http.monitoring import READS
from tandem.cluster.frontends.http.reply import ErrorForm, Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.chat_answer import ChatAnswers
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody, completion_answer
from tandem.cluster.frontends.openai.generation_route import GenerationRoute
from tandem.cluster.frontends.openai.openapi import OPENAPI, OpenApi
from tandem.cluster.frontends.openai.tokenization import DetokenizeBody, Tokenization, TokenizeBody
from tandem.cluster.frontends.responses.answer import ResponsesErrors, responses_answer
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.text.parsers.formats import OutputFormats
from tandem.cluster.text.tokenizer import Tokenizer

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
ERROR_FORMS: Mapping[str, ErrorForm] = MappingProxyType(
    {"/v1/responses": ResponsesErrors(), MESSAGES: MessagesErrors(), COUNT_TOKENS: MessagesErrors()}
)
"""Of paths whose errors are other than OpenAI's older ones."""

BODIES: Mapping[str, type[BodyObject]] = MappingProxyType(
    {
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
        "/v1/responses": ResponsesBody,
        MESSAGES: MessagesBody,
        COUNT_TOKENS: CountBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
)
"""What the routes take, for /openapi.json."""

REQUESTS_A_ROUND = 8  # each takes a fifth of a millisecond, until its workers are asked


def api_routes(
    requests: ActiveRequests,
    tokenizer: Tokenizer | None,
    formats: OutputFormats,
    *,
    names: Sequence[str],
    root: str,
    max_model_len: int,
    quantization: str,
    max_bytes: int,
    bodies: BodyBudget,
    readers: Readers,
    beside: Routes | None = None,
) -> Routes:
    """Both APIs. formats: of the checkpoint's answers. names: of the model; all are accepted, answers have the first.
    root: where the checkpoint is. quantization: see ServedModel. max_bytes: of one body. bodies: counts them. readers:
    read long ones. beside: routes that /openapi.json describes, too."""
    about = {"object": "model", "created": int(time.time()), "owned_by": "tandem"}
    served = {"root": root, "parent": None, "max_model_len": max_model_len}  # as in vLLM
    served["quantization"] = quantization or None
    cards = [{"id": name, **about, **served} for name in names]
    model, *aliases = names
    turns = FairTurns(REQUESTS_A_ROUND)
    shared = requests, model, max_bytes, max_model_len, turns, bodies, readers, tuple(aliases)
    completions = GenerationRoute(CompletionBody, partial(completion_answer, model, tokenizer), *shared)
    answers = ChatAnswers(model, tokenizer, formats)
    chats = GenerationRoute(ChatBody, answers.make, *shared)
    responses = GenerationRoute(ResponsesBody, partial(responses_answer, model, answers), *shared)
    messages = GenerationRoute(MessagesBody, partial(messages_answer, model, answers), *shared)
    tokenization = Tokenization(tokenizer, tuple(names), max_bytes, max_model_len, bodies, readers)
    routes: Routes = {
        MODELS: (READS, _constant({"object": "list", "data": cards})),
        **{f"{MODELS}/{card['id']}": (READS, _constant(card)) for card in cards},
        "/v1/completions": (("POST",), completions.serve),
        "/v1/chat/completions": (("POST",), chats.serve),
        "/v1/responses": (("POST",), responses.serve),
        MESSAGES: (("POST",), messages.serve),
        COUNT_TOKENS: (("POST",), partial(tokenization.count, read_count)),
        "/tokenize": (("POST",), tokenization.tokenize),
        "/detokenize": (("POST",), tokenization.detokenize),
        "/version": (READS, _constant({"version": __version__})),
    }
    routes[OPENAPI] = (READS, OpenApi(routes, beside or {}, BODIES).serve)
    return routes


def _constant(value: object) -> Route:
    async def route(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.whole(200, value)

    return route
