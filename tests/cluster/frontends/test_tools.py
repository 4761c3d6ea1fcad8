"""Tool calls and reasoning over HTTP, of a model that writes what the test says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.text.tokenizer import Tokenizer
from tests.cluster.open_gateway import OpenGateway, open_gateway
from tests.cluster.scripted_model import EOS, SAYS, Script
from tests.support.http_client import CHATS, answer, chunks, post, refused

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 300, "temperature": 0}


def choice(gateway: OpenGateway, **body: Any) -> dict[str, Any]:
    (only,) = answer(gateway.http, CHATS, **ASK | body)["choices"]
    return only


def streamed(gateway: OpenGateway, **body: Any) -> tuple[dict[str, Any], str]:
    """The message that a stream's deltas make, and its finish reason."""
    message: dict[str, Any] = {}
    (*_, last) = events = chunks(gateway.http, CHATS, **ASK | body)
    for event in events:
        delta = event["choices"][0]["delta"]
        for name in delta.keys() - {"tool_calls"}:
            message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, last["choices"][0]["finish_reason"]


def prompt_of(gateway: OpenGateway, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(gateway.worker.prompts[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_calls_come_apart(
    gateway: OpenGateway, model: Script, tokenizer: Tokenizer, stream: bool
) -> None:
    model.begin(SAYS)
    if stream:
        message, reason = streamed(gateway, tools=[TOOL, OTHER])
    else:
        whole = choice(gateway, tools=[TOOL, OTHER])
        message, reason = whole["message"], whole["finish_reason"]
    assert (message["reasoning_content"], message["content"], reason) == ("Hm.", "I look.", "tool_calls")
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Łódź"}
    shown = prompt_of(gateway, tokenizer).partition("<tool_call>: ")[2].partition("\n")[0]
    assert json.loads(shown) == [TOOL, OTHER]


def test_no_parser_looks_for_calls_where_none_may_be(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin(SAYS)
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        only = choice(gateway, **body)
        assert only["message"]["content"] == SAYS.partition("</think>")[2]
        assert only["finish_reason"] == "stop"
        assert "weather" not in prompt_of(gateway, tokenizer)


def test_reasoning_can_be_left_out_and_may_begin_in_the_prompt(gateway: OpenGateway, model: Script) -> None:
    model.begin("<think>Hm.</think>Yes.")
    assert choice(gateway, include_reasoning=False)["message"] == {
        "role": "assistant",
        "refusal": None,
        "content": "Yes.",
    }
    model.begin("Hm.</think>Yes.")
    for think, reasoning in ((True, "Hm."), (False, None)):
        model.begin("Hm.</think>Yes.")
        message = choice(gateway, chat_template_kwargs={"think": think})["message"]
        assert message.get("reasoning_content") == reasoning
        assert message["content"] == ("Yes." if think else "Hm.</think>Yes.")


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(gateway: OpenGateway, model: Script, stream: bool) -> None:
    """The workers' masks are not here: the model writes what they let through."""
    named = {"type": "function", "function": {"name": "weather"}}
    listed = '[{"name": "weather", "parameters": {"city": "x"}}, {"name": "now", "parameters": {}}]'
    for tool_choice, text, reason, count in (
        (named, '{"city": "x"}', "stop", 1),
        ("required", listed, "tool_calls", 2),
    ):
        model.begin(text)
        asked = {"tools": [TOOL, OTHER], "tool_choice": tool_choice}
        if stream:
            message, said = streamed(gateway, **asked)
        else:
            only = choice(gateway, **asked)
            message, said = only["message"], only["finish_reason"]
        assert said == reason
        assert len(message["tool_calls"]) == count
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "x"}
    model.begin(listed)
    one = choice(gateway, tools=[TOOL, OTHER], tool_choice="required", parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1


def test_each_of_several_answers_has_its_own_calls(gateway: OpenGateway, model: Script) -> None:
    model.begin(SAYS)
    both = answer(gateway.http, CHATS, **ASK, tools=[TOOL], n=2)["choices"]
    ids = [one["message"]["tool_calls"][0]["id"] for one in both]
    assert len(set(ids)) == 2


def test_the_template_gets_earlier_calls_and_answers(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    model.begin("ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
    turns = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    said = "system: d\nuser: ?\nassistant:  (r) weather=x\ntool: rain for c1\nassistant: "
    choice(gateway, messages=turns)
    assert prompt_of(gateway, tokenizer) == said
    with Client(gateway.grpc) as client:
        turns[3] = {**turns[3], "content": "rain"}
        list(client.generate(turns, max_tokens=1, timeout=30))
    assert prompt_of(gateway, tokenizer) == said


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "is 'custom'; it must be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "it must be a text"),
        ({"tools": [TOOL, TOOL]}, "tools", "tools has 'weather' twice"),
        ({"tools": [TOOL] * 129}, "tools", "it must be a list of at most 128 objects"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is 'required'; without tools"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "tool_choice is 'maybe'; it must be 'none', 'auto'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "tool_choice names 'x'; tools has weather",
        ),
        (
            {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
            "tool_choice",
            "tool_choice and guided_regex are both set; set only one",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "tree"}}}],
             "tool_choice": "required"},
            "tool_choice",
            "tree",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (1 << 18)}}]},
            "tools",
            "characters; it may have at most 262144",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "is {}; it must be the text of a JSON object",
        ),
    ],
)  # fmt: skip
def test_refusals(gateway: OpenGateway, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(post(gateway.http, CHATS, ASK | body), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_a_template_without_a_known_format_refuses_free_calls(
    folder: Path, tmp_path: Path, script: Script, model: Script
) -> None:
    plain = tmp_path / "model"
    plain.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".jinja":
            (plain / file.name).symlink_to(file)
    with open_gateway(plain, say=script.say, stop_token=EOS, max_model_len=1024) as other:
        error = refused(post(other.http, CHATS, {**ASK, "tools": [TOOL]}), 400)
        assert error["param"] == "tools"
        model.begin('{"city": "x"}')
        named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        assert choice(other, **named)["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "x"}'
    with open_gateway(
        plain, {"gateway.tool_parser": "tagged"}, say=script.say, stop_token=EOS, max_model_len=1024
    ) as other:
        model.begin(SAYS.partition("</think>")[2])
        assert choice(other, tools=[TOOL])["message"]["tool_calls"][0]["function"]["name"] == "weather"
