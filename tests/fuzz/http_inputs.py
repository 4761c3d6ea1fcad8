"""Bad bodies for the HTTP server, from good ones."""

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx

from tests.fuzz.mutations import REAL, SIGNED, TEXT, WIDE, mutated_bytes
from tests.support.http_client import CHATS, COMPLETIONS, refused

STATUSES = {200, 400, 404, 415}
FIELDS = (
    *("model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("stop_token_ids", "ignore_eos", "skip_special_tokens", "return_token_ids", "logprobs", "prompt", "messages"),
    *("max_completion_tokens", "top_logprobs", "n", "tools", "user", "role", "nonsense"),
    *("echo", "regex", "ebnf", "response_format", "reasoning_effort", "logit_bias", "tool_choice", "input", "include"),
    *("text", "truncation", "system", "output_config", "stop_sequences", "chat_template_kwargs"),
)
TURNS = [{"role": "user", "content": "x"}]
CHAT_LIKE: dict[str, dict[str, Any]] = {
    CHATS: {"messages": TURNS},
    "/v1/responses": {"input": TURNS},
    "/v1/messages": {"messages": TURNS},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"messages": TURNS},
}
PATHS = (*[COMPLETIONS] * 5, *CHAT_LIKE)


async def bad_post(client: httpx.AsyncClient, rng: random.Random, prompt: Sequence[int]) -> int:
    """Returns the status of a call whose body may be spoilt. AssertionError, with the body, for a malformed answer."""
    path = rng.choice(PATHS)
    body: dict[str, Any] = {"max_tokens": 3, "seed": 3, "stream": rng.random() < 0.3}
    body |= {"prompt": list(prompt)} if path == COMPLETIONS else CHAT_LIKE[path]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        body[rng.choice(FIELDS)] = _value(rng, 2)
    data = json.dumps(body).encode()
    if rng.random() < 0.3:
        data = mutated_bytes(rng, data)
    kind = rng.choice(("application/json",) * 9 + ("text/plain",))
    response = await client.post(path, content=data, headers={"content-type": kind})
    described = f"{path} with {data[:500]!r} answered {response.status_code}: {response.text[:500]}"
    assert response.status_code in STATUSES, described
    if path not in (COMPLETIONS, CHATS):
        assert response.status_code == 200 or response.json()["error"]["message"], described
    elif response.status_code != 200:
        refused(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), described
    else:
        assert response.json()["usage"]["completion_tokens"] > 0 or b"echo" in data, described
    return response.status_code


def _value(rng: random.Random, depth: int) -> Any:
    """Draws anything that JSON can hold, and some values that only Python's JSON can."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3, 70)))]
    if kind == 7:
        return {rng.choice((*FIELDS, "content", "type")): _value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return rng.choice((None, rng.random() < 0.5, rng.choice(WIDE), rng.choice(SIGNED), rng.choice(REAL), _text(rng)))


def _text(rng: random.Random) -> str:
    return rng.choice((*TEXT, "user", "model", "\ud800"))
