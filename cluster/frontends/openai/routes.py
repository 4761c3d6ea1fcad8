"""The routes of OpenAI's API."""

import time
from collections.abc import Sequence
from importlib.metadata import version

from tandem.cluster.frontends.http.app import MODELS, Route, Routes
from tandem.cluster.frontends.http.monitoring import READS
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.chat_answer import ChatAnswers
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionAnswers, CompletionBody
from tandem.cluster.frontends.openai.generation_route import GenerationRoute
from tandem.cluster.frontends.openai.tokenization import Tokenization
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.readers import Readers
from tandem.cluster.text.parsers.formats import OutputFormats
from tandem.cluster.text.tokenizer import Tokenizer

REQUESTS_A_ROUND = 8  # each takes a fifth of a millisecond, until its workers are asked


def openai_routes(
    requests: ActiveRequests,
    tokenizer: Tokenizer | None,
    formats: OutputFormats,
    *,
    names: Sequence[str],
    max_model_len: int,
    max_bytes: int,
    bodies: BodyBudget,
    readers: Readers,
) -> Routes:
    """OpenAI's API. formats: of the checkpoint's answers. names: of the model; all are accepted, answers have the
    first. max_bytes: of one body. bodies: counts them. readers: read long ones."""
    about = {"object": "model", "created": int(time.time()), "owned_by": "tandem", "max_model_len": max_model_len}
    cards = [{"id": name, **about} for name in names]
    model, *aliases = names
    turns = FairTurns(REQUESTS_A_ROUND)
    shared = requests, model, max_bytes, max_model_len, turns, bodies, readers, tuple(aliases)
    completions = GenerationRoute(CompletionBody, CompletionAnswers(model, tokenizer).make, *shared)
    chats = GenerationRoute(ChatBody, ChatAnswers(model, tokenizer, formats).make, *shared)
    tokenization = Tokenization(tokenizer, tuple(names), max_bytes, max_model_len, bodies, readers)
    return {
        MODELS: (READS, _constant({"object": "list", "data": cards})),
        **{f"{MODELS}/{card['id']}": (READS, _constant(card)) for card in cards},
        "/v1/completions": (("POST",), completions.serve),
        "/v1/chat/completions": (("POST",), chats.serve),
        "/tokenize": (("POST",), tokenization.tokenize),
        "/detokenize": (("POST",), tokenization.detokenize),
        "/version": (READS, _constant({"version": version("tandem")})),
    }


def _constant(value: object) -> Route:
    async def route(scope: Scope, receive: Receive, reply: Reply) -> None:
        await reply.whole(200, value)

    return route
