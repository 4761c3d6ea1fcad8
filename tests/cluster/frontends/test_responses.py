"""/v1/responses: items of a whole answer, and the events that build the same."""

import json
from typing import Any

import httpx
import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway
from tests.cluster.scripted_model import SAYS, Script, named_events
from tests.support.http_client import answer, post, refused

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ASK: dict[str, Any] = {"input": "?", "max_output_tokens": 300, "temperature": 0}
VARYING = {"id", "created_at"}


def stable(value: Any) -> Any:
    """Without what differs from one request to the next."""
    if isinstance(value, dict):
        return {name: stable(held) for name, held in value.items() if name not in {"id", "call_id", "created_at"}}
    return [stable(one) for one in value] if isinstance(value, list) else value


def test_items_of_a_whole_answer(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin(SAYS)
    said = answer(gateway.http, PATH, **ASK, instructions="Be brief.", tools=[TOOL], metadata={"a": "b"})
    thought, message, call = said["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Łódź"})
    assert {item["status"] for item in said["output"]} == {"completed"}
    assert (said["object"], said["status"], said["metadata"], said["tool_choice"]) == (
        "response", "completed", {"a": "b"}, "auto")  # fmt: skip
    prompt = gateway.worker.prompts[-1]
    assert said["usage"]["input_tokens"] == len(prompt)
    assert said["usage"]["total_tokens"] == len(prompt) + said["usage"]["output_tokens"]
    assert tokenizer.decode(prompt).endswith("system: Be brief.\nuser: ?\nassistant: ")


def test_events_build_the_whole_answer(gateway: OpenGateway, model: Script) -> None:
    model.begin(SAYS)
    whole = answer(gateway.http, PATH, **ASK, tools=[TOOL])
    model.begin(SAYS)
    events = named_events(post(gateway.http, PATH, {**ASK, "tools": [TOOL], "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert stable(events[-1]["response"]) == stable(whole)
    built: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(built)
            built.append({**event["item"], "text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == built[event["output_index"]]["id"]
            built[event["output_index"]]["text"] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(built) - 1
    texts = ["Hm.", "I look.", whole["output"][2]["arguments"]]
    assert [item["text"] for item in built] == texts
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == (
        events[-1]["response"]["output"]
    )


def test_an_answer_that_is_cut_off(gateway: OpenGateway, model: Script) -> None:
    model.begin("one two three four five six seven")
    body = {**ASK, "max_output_tokens": 4}
    whole = answer(gateway.http, PATH, **body)
    model.begin("one two three four five six seven")
    *_, last = named_events(post(gateway.http, PATH, {**body, "stream": True}))
    for said in (whole, last["response"]):
        assert said["status"] == "incomplete"
        assert said["incomplete_details"] == {"reason": "max_output_tokens"}
        assert said["output"][0]["status"] == "incomplete"
    assert last["type"] == "response.incomplete"


def test_the_output_goes_back_as_input(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin(SAYS)
    output = answer(gateway.http, PATH, **ASK, tools=[TOOL])["output"]
    call_id = output[2]["call_id"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        *output,
        {"type": "function_call_output", "call_id": call_id, "output": "rain"},
    ]
    model.begin("ok")
    answer(gateway.http, PATH, **ASK | {"input": items})
    prompt = tokenizer.decode(gateway.worker.prompts[-1])
    turns = f"user: ?\nassistant: I look. (Hm.) weather=Łódź\ntool: rain for {call_id}\nassistant: "
    assert prompt.endswith(turns)


def test_forced_calls(gateway: OpenGateway, model: Script) -> None:
    model.begin('{"city": "x"}')
    said = answer(gateway.http, PATH, **ASK, tools=[TOOL], tool_choice={"type": "function", "name": "weather"})
    (call,) = said["output"]
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "x"}')
    assert said["tools"] == [TOOL]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "it must be text, or a list of items"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "is missing; it must be text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "it must be 'message'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content",
            "text, or a list of parts",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "it must be null: no response is stored here"),
        ({"background": True}, "background", "it must be false"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "it must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "tree"}}}}, "text", "tree"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"model": "other"}, "model", "is served here"),
    ],
)
def test_refusals(gateway: OpenGateway, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(post(gateway.http, PATH, ASK | body), 404 if "model" in body else 400)
    assert error["param"] == param
    assert words in error["message"]


def test_an_error_in_a_stream_is_its_last_event(gateway: OpenGateway, model: Script) -> None:
    model.begin("one two three four five six seven")
    gateway.worker.fails["StartGenerate"] = ["go on", "INVALID_ARGUMENT"]
    response: httpx.Response = post(gateway.http, PATH, {**ASK, "stream": True})
    gateway.worker.fails.clear()
    *_, last = named_events(response)
    assert last["type"] == "error"
    assert last["message"]
