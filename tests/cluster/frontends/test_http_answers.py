"""Chunks of a stream: those that fill in what the first one left, against objects that are built anew."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tandem.cluster.frontends.http.json_blocks import json_blocks
from tandem.cluster.frontends.openai.answer import Answer
from tandem.cluster.frontends.openai.chat_answer import ChatAnswer
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionAnswer, CompletionBody
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.read_body import read_body
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tests.support.byte_tokenizers import byte_fallback, byte_level

MODEL = 'a "model": \\ "token_ids":[] \u00e9'
TEXTS = ("first", '"quoted", \\ and "token_ids":[]', "\0", "", "\u2028 \U0001f600\n\n", "data: [DONE]", "last")
KINDS: list[tuple[Any, type[GenerationBody], dict[str, Any]]] = [
    (CompletionAnswer, CompletionBody, {"prompt": [5]}),
    (ChatAnswer, ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
]


def messages(texts: tuple[str, ...]) -> list[inference_pb2.GenerateResponse]:
    """Makes the messages of a request; each has one token more than the one before, and the last one ends it."""
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


def data_of(blocks: Iterable[bytes]) -> str:
    """Returns the data of one event."""
    event = b"".join(blocks).decode()
    assert event.startswith("data: ")
    assert event.endswith("\n\n")
    return event[6:-2]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize(("answer", "body", "prompt"), KINDS, ids=["completion", "chat"])
def test_chunks(answer: Any, body: type[GenerationBody], prompt: dict[str, Any], token_ids: bool, usage: bool) -> None:
    wanted = {**prompt, "stream": True, "stream_options": {"include_usage": usage}, "return_token_ids": token_ids}
    given = [lambda: None] if answer is ChatAnswer else []
    read: Any = read_body(body, json.dumps(wanted).encode())
    stream = answer(read, MODEL, None, *given)
    chunks = [data_of(stream.events(message)) for message in messages(TEXTS)]
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
        assert json.loads(data_of(stream.events(message)))["choices"][0]["logprobs"]["tokens"] == [f"token_id:{index}"]


def choice_of(answer: Answer, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
    """Returns the choice of one message that is the whole answer."""
    answer.keep(message)
    return json.loads(b"".join(json_blocks(answer.choice())))


TEXT = "a \N{SWAN}"  # whose last character has four bytes, of which the first comes with the space


def scored(tokenizer: Tokenizer) -> list[inference_pb2.TokenLogprobs]:
    """The tokens of TEXT, each with the two before it in the vocabulary."""
    found = []
    for token in tokenizer.encode(TEXT):
        one = inference_pb2.TokenLogprobs()
        one.chosen.token_id = token
        for other in (token - 1, token - 2):
            one.top.add().token_id = other
        found.append(one)
    return found


def message(tokenizer: Tokenizer) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id="r", text=TEXT, logprobs=scored(tokenizer))


def test_chats_tell_parts_of_characters_by_their_bytes() -> None:
    tokenizer = byte_level()
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    for by_id in (False, True):
        body = read_body(ChatBody, json.dumps(fields | {"return_tokens_as_token_ids": by_id}).encode())
        choice = choice_of(ChatAnswer(body, MODEL, tokenizer, lambda: None), message(tokenizer))
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(one["bytes"]) for one in entries) == TEXT.encode()
        names = [one["token"] for one in entries]
        assert names == (
            [f"token_id:{one}" for one in tokenizer.encode(TEXT)] if by_id else ["a", " \\xf0", "\\x9f\\xa6", "\\xa2"]
        )
        for one in entries:
            assert len({tuple(other["bytes"]) for other in (one, *one["top_logprobs"])}) == 3
    body = read_body(ChatBody, json.dumps(fields).encode())
    (first, *_) = choice_of(ChatAnswer(body, MODEL, None, lambda: None), message(tokenizer))["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == (f"token_id:{tokenizer.encode(TEXT)[0]}", None)


def test_completions_tell_parts_of_characters_apart() -> None:
    tokenizer = byte_level()
    body = read_body(CompletionBody, json.dumps({"prompt": [5], "logprobs": 2}).encode())
    found = choice_of(CompletionAnswer(body, MODEL, tokenizer), message(tokenizer))["logprobs"]
    assert found["tokens"] == ["a", "bytes: \\xf0", "bytes:\\x9f\\xa6", "bytes:\\xa2"]
    assert found["text_offset"] == [0, 1, 2, 2]
    for name, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert (len(top), list(top)[-1]) == (3, name)


def test_alternatives_of_the_same_text_stay_apart() -> None:
    """Bytes and pieces of SentencePiece can have the same text; the chosen token keeps it."""
    tokenizer = byte_fallback()
    piece, byte = tokenizer.encode("a")[0], 1 + ord("a")
    body = read_body(CompletionBody, json.dumps({"prompt": [5], "logprobs": 2}).encode())
    for chosen, top in ((piece, (byte, piece)), (byte, (byte, piece)), (5, (byte, piece))):
        one = inference_pb2.TokenLogprobs()
        one.chosen.token_id, one.chosen.logprob = chosen, -float(chosen)
        for other in top:
            one.top.add(token_id=other, logprob=-float(other))
        answer = CompletionAnswer(body, MODEL, tokenizer)
        (told,) = choice_of(answer, inference_pb2.GenerateResponse(logprobs=[one]))["logprobs"]["top_logprobs"]
        assert sorted(told.values()) == sorted({-float(token) for token in (chosen, *top)})
        assert told["a"] == -float(chosen if chosen in top else byte)


def test_an_echo_and_its_output_have_offsets_in_one_text() -> None:
    tokenizer = byte_level()
    body = read_body(CompletionBody, json.dumps({"prompt": TEXT, "logprobs": 0, "echo": True}).encode())
    told = message(tokenizer)
    told.prompt_logprobs.extend([inference_pb2.TokenLogprobs(), *scored(tokenizer)[1:]])
    choice = choice_of(CompletionAnswer(body, MODEL, tokenizer), told)
    assert choice["text"] == TEXT + TEXT
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 5]
    assert choice["logprobs"]["tokens"] == ["a", "bytes: \\xf0", "bytes:\\x9f\\xa6", "bytes:\\xa2"] * 2
