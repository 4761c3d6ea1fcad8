"""Stop strings in outputs that are to have a least length, through each frontend."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway
from tests.cluster.scripted_model import Script
from tests.support.http_client import CHATS, COMPLETIONS, answer, chunks

TEXT = "ababab abc abab"
TURNS: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
Ask = Callable[..., list[str]]  # the texts of all answers to a request with these parameters


def completion(gateway: OpenGateway, **sampling: Any) -> list[str]:
    return [one["text"] for one in answer(gateway.http, COMPLETIONS, prompt="?", **sampling)["choices"]]


def stream(gateway: OpenGateway, **sampling: Any) -> list[str]:
    texts = [""] * sampling.get("n", 1)
    for chunk in chunks(gateway.http, CHATS, **TURNS, **sampling):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


def response(gateway: OpenGateway, max_tokens: int, n: int = 1, **sampling: Any) -> list[str]:
    said = answer(gateway.http, "/v1/responses", input="?", max_output_tokens=max_tokens, **sampling)
    return ["".join(part["text"] for item in said["output"] for part in item["content"])] * n


def over_grpc(gateway: OpenGateway, **sampling: Any) -> list[str]:
    texts = [""] * sampling.get("n", 1)
    with Client(gateway.grpc) as client:
        for update in client.generate("?", **sampling):
            texts[update.index] += update.text
    return texts


def expected(tokenizer: Tokenizer, tokens: list[int], stop: str, least: int) -> str:
    """The stop string that ends first behind the text of the first tokens ends the output."""
    text, passed = tokenizer.decode(tokens), len(tokenizer.decode(tokens[:least]))
    ends = [end for end in range(passed + 1, len(text) + 1) if text[:end].endswith(stop)]
    return text[: ends[0] - len(stop)] if ends else text


@pytest.mark.parametrize("ask", [completion, stream, response, over_grpc])
def test_no_stop_string_ends_an_output_before_its_least_length(
    gateway: OpenGateway, model: Script, tokenizer: Tokenizer, ask: Ask
) -> None:
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    model.begin(TEXT)  # once: a worker may write on for a moment when the gateway has found a stop string
    for stop, least in (("ab", 0), ("ab", 1), ("ab", 4), ("bab", 3), ("c ", 9), ("ab", len(tokens)), ("zz", 2)):
        texts = ask(gateway, stop=[stop], min_tokens=least, max_tokens=99, n=2)
        assert set(texts) == {expected(tokenizer, tokens, stop, least)}, (stop, least)
