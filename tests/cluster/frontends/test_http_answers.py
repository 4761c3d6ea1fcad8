"""Chunks of a stream: those that fill in what the first one left, against objects that are built anew."""

import json
from typing import Any

import pytest

from tandem.cluster.frontends.openai.answer import Answer
from tandem.cluster.frontends.openai.chat_answer import ChatAnswer
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionAnswer, CompletionBody
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.read_body import read_body
from tandem.proto import inference_pb2

MODEL = 'a "model": \\ "token_ids":[] \u00e9'
TEXTS = ("first", '"quoted", \\ and "token_ids":[]', "\0", "", "\u2028 \U0001f600\n\n", "data: [DONE]", "last")
KINDS: list[tuple[Any, type[GenerationBody], dict[str, Any]]] = [
    (CompletionAnswer, CompletionBody, {"prompt": [5]}),
    (ChatAnswer, ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
]


def messages(texts: tuple[str, ...]) -> list[inference_pb2.GenerateResponse]:
    """Of a request; each has one token more than the one before, and the last one ends it."""
    return [
        inference_pb2.GenerateResponse(
            request_id="r",
            text=text,
            token_ids=range(index),
            finish_reason=inference_pb2.FINISH_REASON_LENGTH if index == len(texts) - 1 else 0,  # type: ignore[arg-type]
        )
        for index, text in enumerate(texts)
    ]


def expected(kind: type[Answer], index: int, text: str, token_ids: bool) -> dict[str, Any]:
    role = {} if index else {"role": "assistant"}
    choice = {"text": text} if kind is CompletionAnswer else {"delta": {**role, "content": text}}
    reason = "length" if index == len(TEXTS) - 1 else None
    ids = {"token_ids": list(range(index))} if token_ids else {}
    return {"index": 0, **choice, "logprobs": None, "finish_reason": reason, "stop_reason": None, **ids}


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize(("answer", "body", "prompt"), KINDS, ids=["completion", "chat"])
def test_chunks(answer: Any, body: type[GenerationBody], prompt: dict[str, Any], token_ids: bool, usage: bool) -> None:
    wanted = {**prompt, "stream": True, "stream_options": {"include_usage": usage}, "return_token_ids": token_ids}
    given = [lambda: None] if answer is ChatAnswer else []
    read: Any = read_body(body, json.dumps(wanted).encode())
    stream = answer(read, MODEL, None, *given)
    chunks = [stream.chunk(message) for message in messages(TEXTS)]
    assert all(chunk.isascii() and "\n" not in chunk for chunk in chunks)
    first, *_ = objects = [json.loads(chunk) for chunk in chunks]
    for index, (chunk, text) in enumerate(zip(objects, TEXTS, strict=True)):
        assert chunk["choices"] == [expected(answer, index, text, token_ids)]
        assert list(chunk) == ["id", "object", "created", "model", "choices", *(["usage"] if usage else [])]
        assert {**chunk, "choices": None} == {**first, "choices": None}
    assert first["model"] == MODEL


def test_each_chunk_has_its_own_logprobs() -> None:
    body = read_body(CompletionBody, json.dumps({"prompt": [5], "stream": True, "logprobs": 0}).encode())
    stream = CompletionAnswer(body, MODEL, None)
    for index, message in enumerate(messages(TEXTS)):
        message.logprobs.add().chosen.token_id = index
        assert json.loads(stream.chunk(message))["choices"][0]["logprobs"]["tokens"] == [f"token_id:{index}"]
