"""The routes of OpenAI's API."""

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType

from tandem.cluster.frontends.http.app import MODELS, Route, Routes
from tandem.cluster.frontends.http.monitoring import READS
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.chats import ChatAnswer, ChatBody
from tandem.cluster.frontends.openai.completions import CompletionAnswer, CompletionBody
from tandem.cluster.frontends.openai.generation_route import GenerationRoute
from tandem.cluster.frontends.openai.openapi import OPENAPI, OpenApi
from tandem.cluster.frontends.openai.part import Part
from tandem.cluster.frontends.openai.tokenization import DetokenizeBody, Tokenization, TokenizeBody
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.readers import Readers
from tandem.cluster.text.tokenizer import Tokenizer

BODIES: Mapping[str, type[Part]] = MappingProxyType(
    {
        "/v1/completions": CompletionBody,
        "/v1/chat/completions": ChatBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
)
"""What the routes take, for /openapi.json."""
REQUESTS_A_ROUND = 8  # each takes a fifth of a millisecond, until its workers are asked


def openai_routes(
    requests: ActiveRequests,
    tokenizer: Tokenizer | None,
    *,
    names: Sequence[str],
    max_model_len: int,
    max_bytes: int,
    bodies: BodyBudget,
    readers: Readers,
    beside: Routes | None = None,
) -> Routes:
    """OpenAI's API. names: of the model; all are accepted, answers have the first. max_bytes: of one body. bodies:
    counts them. readers: read long ones. beside: routes that /openapi.json describes, too."""
    about = {"object": "model", "created": int(time.time()), "owned_by": "tandem", "max_model_len": max_model_len}
    cards = [{"id": name, **about} for name in names]
    model, *aliases = names
    turns = FairTurns(REQUESTS_A_ROUND)
    shared = requests, model, tokenizer, max_bytes, max_model_len, turns, bodies, readers, tuple(aliases)
    completions = GenerationRoute(CompletionBody, CompletionAnswer, *shared)
    chats = GenerationRoute(ChatBody, ChatAnswer, *shared)
    tokenization = Tokenization(tokenizer, tuple(names), max_bytes, max_model_len, bodies, readers)
    routes: Routes = {
        MODELS: (READS, _constant({"object": "list", "data": cards})),
        **{f"{MODELS}/{card['id']}": (READS, _constant(card)) for card in cards},
        "/v1/completions": (("POST",), completions.serve),
        "/v1/chat/completions": (("POST",), chats.serve),
        "/tokenize": (("POST",), tokenization.tokenize),
        "/detokenize": (("POST",), tokenization.detokenize),
        "/version": (READS, _constant({"version": version("tandem")})),
    }
    routes[OPENAPI] = (READS, OpenApi(routes, beside or {}, BODIES).serve)
    return routes


def _constant(value: object) -> Route:
    async def route(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.whole(200, value)

    return route
