"""Calls through the HTTP server, as tests make them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SECONDS = 60.0
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def get(address: str, path: str, **options: Any) -> httpx.Response:
    return httpx.get(f"http://{address}{path}", timeout=SECONDS, trust_env=False, **options)


def post(address: str, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"http://{address}{path}", json=body, timeout=SECONDS, trust_env=False, **options)


def answer(address: str, path: str, **body: Any) -> dict[str, Any]:
    """Returns the whole answer to a good request."""
    response = post(address, path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    return response.json()


def events(lines: Iterator[str]) -> Iterator[Any]:
    """Yields the content of each event of a stream; the last must be [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            assert not [rest for rest in lines if rest]
            return
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


@contextmanager
def streaming(address: str, path: str, **body: Any) -> Iterator[Iterator[str]]:
    """Yields the lines of a stream that has begun."""
    with httpx.stream(
        "POST", f"http://{address}{path}", json={**body, "stream": True}, timeout=SECONDS, trust_env=False
    ) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield response.iter_lines()


def chunks(address: str, path: str, **body: Any) -> list[Any]:
    """Returns the events of a whole stream."""
    with streaming(address, path, **body) as lines:
        return list(events(lines))


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """Returns the error of a response, in the form that OpenAI's clients read."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error
