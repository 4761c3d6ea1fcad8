"""/v1/messages: blocks of a whole answer, and the events that build the same."""

from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.cluster.scripted_model import SAYS, Script, named_events
from tests.support.http_client import answer, post

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "It rains.", "input_schema": {"type": "object"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 300, "temperature": 0}


def test_blocks_of_a_whole_answer(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin(SAYS)
    said = answer(gateway.http, PATH, **ASK, tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])
    thought, text, call = said["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Łódź"})
    assert (said["type"], said["role"], said["stop_reason"], said["stop_sequence"]) == (
        "message", "assistant", "tool_use", None)  # fmt: skip
    prompt = gateway.worker.prompts[-1]
    assert said["usage"]["input_tokens"] + said["usage"]["cache_read_input_tokens"] == len(prompt)
    assert tokenizer.decode(prompt).endswith("system: Be brief.\nuser: ?\nassistant: ")
    counted = answer(gateway.http, f"{PATH}/count_tokens", messages=ASK["messages"], system="Be brief.", tools=[TOOL])
    assert counted == {"input_tokens": len(prompt)}


def test_events_build_the_whole_answer(gateway: OpenGateway, model: Script) -> None:
    model.begin(SAYS)
    whole = answer(gateway.http, PATH, **ASK, tools=[TOOL])
    model.begin(SAYS)
    first, *events, delta, stop = named_events(post(gateway.http, PATH, {**ASK, "tools": [TOOL], "stream": True}))
    assert (first["type"], first["message"]["content"], stop["type"]) == ("message_start", [], "message_stop")
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == whole["usage"]
    counted = whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"]
    assert first["message"]["usage"]["input_tokens"] == counted > 0
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(texts)
            assert event["content_block"]["type"] == whole["content"][len(texts)]["type"]
            texts.append("")
        elif event["type"] == "content_block_delta":
            held = event["delta"]
            texts[event["index"]] += held.get("text") or held.get("thinking") or held.get("partial_json") or ""
        else:
            assert event == {"type": "content_block_stop", "index": len(texts) - 1}
    assert texts == ["Hm.", "I look.", '{"city": "Łódź"}']


def test_blocks_go_back_to_the_template(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin("ok")
    turns = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            ],
        },
    ]
    answer(gateway.http, PATH, **ASK | {"messages": turns})
    said = "user: ?\nassistant: I look. (Hm.) weather=x\ntool: rain for t1\nuser: And?\nassistant: "
    assert tokenizer.decode(gateway.worker.prompts[-1]) == said


def test_stops(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    text = "one two three four five six seven"
    for body, reason, sequence, shown in (
        ({}, "end_turn", None, text),
        ({"stop_sequences": ["four"]}, "stop_sequence", "four", "one two three "),
        ({"max_tokens": 3}, "max_tokens", None, None),
    ):
        model.begin(text)
        said = answer(gateway.http, PATH, **ASK | body)
        assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)
        assert shown is None or said["content"] == [{"type": "text", "text": shown}]
    model.begin("and goes on")
    turns = [*ASK["messages"], {"role": "assistant", "content": "It begins"}]
    answer(gateway.http, PATH, **ASK | {"messages": turns})
    assert tokenizer.decode(gateway.worker.prompts[-1]) == "user: ?\nassistant: It begins"


def test_forced_calls(gateway: OpenGateway, model: Script) -> None:
    for choice, text in (
        ({"type": "tool", "name": "weather"}, '{"city": "x"}'),
        ({"type": "any", "disable_parallel_tool_use": True}, '[{"name": "weather", "parameters": {"city": "x"}}]'),
    ):
        model.begin(text)
        said = answer(gateway.http, PATH, **ASK, tools=[TOOL], tool_choice=choice)
        (call,) = said["content"]
        assert (call["name"], call["input"], said["stop_reason"]) == ("weather", {"city": "x"}, "tool_use")


@pytest.mark.parametrize("begin", ["", '[{"name": "weather", "parameters": '])
def test_a_call_that_is_cut_off_has_the_arguments_that_came(
    gateway: OpenGateway, model: Script, tokenizer: Tokenizer, begin: str
) -> None:
    choice = {"type": "any"} if begin else {"type": "tool", "name": "weather"}
    text = begin + '{"city": "Łódź", "days": [1, 23]}' + "}]" * bool(begin)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for came, arguments in (
        ('{"city', {}),
        ("Łód", {"city": "Łód"}),
        ("[1, 2", {"city": "Łódź", "days": [1, 2]}),
        ("23]", {"city": "Łódź", "days": [1, 23]}),
    ):
        count = next(one for one in range(len(tokens)) if came in tokenizer.decode(tokens[:one]))
        model.begin(text)
        said = answer(gateway.http, PATH, **ASK | {"max_tokens": count}, tools=[TOOL], tool_choice=choice)
        assert ([call["input"] for call in said["content"]], said["stop_reason"]) == ([arguments], "max_tokens")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages is []; it must be a list of 1 to 16384 messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role is 'system'; it must be 'user' or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type is 'image'; it must be 'text'",
        ),
        ({"max_tokens": None}, "max_tokens is missing; it must be an integer of at least 1"),
        ({"max_tokens": 5000}, "max_tokens is 5000"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type is 'web_search_20250305'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'; tools has weather"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_p": 2}, "top_p is 2"),
    ],
)
def test_refusals(gateway: OpenGateway, body: dict[str, Any], words: str) -> None:
    response = post(gateway.http, PATH, ASK | body)
    assert response.status_code == 400
    said = response.json()
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert words in said["error"]["message"]


def test_errors_before_and_in_a_stream(gateway: OpenGateway, model: Script) -> None:
    response = post(gateway.http, PATH, {**ASK, "model": "other"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    model.begin("one two three four five six seven")
    gateway.worker.fails["StartGenerate"] = ["go on", "INVALID_ARGUMENT"]
    *_, last = named_events(post(gateway.http, PATH, {**ASK, "stream": True}))
    gateway.worker.fails.clear()
    assert last["type"] == "error"


def test_a_key_comes_in_either_header(folder: Path, script: Script) -> None:
    with open_gateway(folder, {"security.api_key": "k" * 40}, say=script.say, max_model_len=1024) as guarded:
        script.begin("ok")
        for headers, status in (
            ({"x-api-key": "k" * 40}, 200),
            ({"authorization": "Bearer " + "k" * 40}, 200),
            ({"x-api-key": "other"}, 401),
            ({"x-api-key": "k" * 40, "authorization": "Bearer other"}, 401),
        ):
            response = post(guarded.http, PATH, {**ASK, "max_tokens": 3}, headers=headers)
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["type"] == "authentication_error"
