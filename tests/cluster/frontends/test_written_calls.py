"""Calls as models write them, through chats, responses and messages, whole and streamed."""

import json
from typing import Any

import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway
from tests.cluster.scripted_model import Script, named_events
from tests.support.client_requests import complete, text_of
from tests.support.http_client import CHATS, answer, chunks, post

PARAMETERS = {"type": "object", "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
TOOL = {"name": "f", "parameters": PARAMETERS}
ASK: dict[str, Any] = {"temperature": 0}
SENT = '<tool_call>{"name": "g", "arguments": {"city": "x"}}</tool_call>'
THOUGHT = '<think>Hm.\n<tool_call>{"name": "f", "arguments": {"city": "7"}}</tool_call>'
XML = "Hm.\n<function=f>\n<parameter=city>\n7\n</function>"
CALL = ("f", {"city": "7"})

Said = tuple[str, str, list[tuple[str, Any]]]  # reasoning, content and calls


def chat(gateway: OpenGateway, stream: bool) -> Said:
    body = ASK | {
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 300,
        "tools": [{"type": "function", "function": TOOL}],
    }
    if not stream:
        message = answer(gateway.http, CHATS, **body)["choices"][0]["message"]
        calls = [one["function"] for one in message.get("tool_calls", ())]
        found = [(one["name"], json.loads(one["arguments"])) for one in calls]
        return message.get("reasoning_content") or "", message["content"] or "", found
    deltas = [event["choices"][0]["delta"] for event in chunks(gateway.http, CHATS, **body)]
    texts = ["".join(one.get(name) or "" for one in deltas) for name in ("reasoning_content", "content")]
    parts = [call["function"] for one in deltas for call in one.get("tool_calls", ())]
    names = [part["name"] for part in parts if "name" in part]
    arguments = "".join(part["arguments"] for part in parts)
    return texts[0], texts[1], [(name, json.loads(arguments)) for name in names]


def respond(gateway: OpenGateway, stream: bool) -> Said:
    body = ASK | {"input": "?", "max_output_tokens": 300, "tools": [TOOL | {"type": "function"}]}
    if stream:
        response = named_events(post(gateway.http, "/v1/responses", body | {"stream": True}))[-1]["response"]
    else:
        response = answer(gateway.http, "/v1/responses", **body)
    items = response["output"]
    texts = {kind: "" for kind in ("reasoning", "message")}
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    calls = [(one["name"], json.loads(one["arguments"])) for one in items if one["type"] == "function_call"]
    return texts["reasoning"], texts["message"], calls


def send(gateway: OpenGateway, stream: bool) -> Said:
    body = ASK | {
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 300,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
    }
    if not stream:
        blocks = answer(gateway.http, "/v1/messages", **body)["content"]
    else:
        blocks = []
        for event in named_events(post(gateway.http, "/v1/messages", body | {"stream": True})):
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                name = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
                held = name[event["delta"]["type"]]
                blocks[-1]["json" if held == "partial_json" else held] += event["delta"][held]
    texts = ["".join(block[name] for block in blocks if block["type"] == name) for name in ("thinking", "text")]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    calls = [(use["name"], json.loads(use["json"]) if "json" in use else use["input"]) for use in uses]
    return texts[0], texts[1], calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, respond, send])
def test_calls_through_each_api(gateway: OpenGateway, model: Script, ask: Any, stream: bool) -> None:
    """A call that nobody offers is content, a parameter that may be a text stays one, and a call ends the reasoning."""
    for text, said in (
        (SENT, ("", SENT, [])),
        (XML, ("", "Hm.", [CALL])),
        (THOUGHT, ("Hm.", "", [CALL])),
    ):
        model.begin(text)
        assert ask(gateway, stream) == said


@pytest.mark.parametrize("arguments", ["", "null", '{"city": "cut', "[1]"])
def test_conversations_go_on_behind_arguments_that_are_no_object(
    gateway: OpenGateway, model: Script, arguments: str
) -> None:
    model.begin("ok")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "failed"},
    ]
    assert answer(gateway.http, CHATS, messages=turns)["choices"][0]["message"]["content"] == "ok"
    items = [
        {"role": "user", "content": "?"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "failed"},
    ]
    model.begin("ok")
    assert answer(gateway.http, "/v1/responses", input=items)["status"] == "completed"
    turns[1]["content"] = ""
    model.begin("ok")
    assert text_of(complete(gateway.grpc, turns, max_tokens=9)) == "ok"


def test_what_max_tokens_cuts_off_goes_back(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    text = "<function=f>\n<parameter=city>\nsomewhere that is very far away"
    model.begin(text)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    body = {"max_tokens": len(tokenizer.encode(text)) - 3, "tools": [{"type": "function", "function": TOOL}]}
    (only,) = answer(gateway.http, CHATS, messages=turns, **body)["choices"]
    arguments = only["message"]["tool_calls"][0]["function"]["arguments"]
    assert only["finish_reason"] == "length"
    assert arguments.startswith('{"city": "some')
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(arguments)
    model.begin("ok")
    assert answer(gateway.http, CHATS, messages=[*turns, only["message"]], **body)["choices"][0]["message"]["content"]
