"""Bodies as other languages, servers and APIs write them: what becomes of them at the gateway."""

import json
from typing import Any

import pytest

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody
from tandem.cluster.frontends.openai.read_body import read_body
from tandem.cluster.frontends.responses.body import ResponsesBody
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tests.cluster.open_gateway import OpenGateway
from tests.cluster.scripted_model import Script
from tests.support.http_client import CHATS, COMPLETIONS, answer, post, refused

TURN = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
TOOL = {"function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
PLAIN = {ChatBody: {"messages": [TURN]}, CompletionBody: {"prompt": "x"}, ResponsesBody: {"input": "x"}}
PLAIN |= {MessagesBody: {"messages": [TURN], "max_tokens": 9}}


def asked(kind: type[Any], **fields: Any) -> inference_pb2.GenerateRequest:
    (made,) = read_body(kind, json.dumps(PLAIN[kind] | fields).encode()).requests()
    return made


def test_whole_numbers_may_have_a_point() -> None:
    sampling = asked(ChatBody, max_tokens=8.0, top_k=5.0, seed=42.0, temperature=1.0, n=2.0).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.n) == (8, 5, 42, 2)
    with pytest.raises(HttpError, match="max_tokens is 1e\\+300"):
        asked(ChatBody, max_tokens=1e300)


@pytest.mark.parametrize(("given", "seed"), [(-2, 2**64 - 2), (-(2**63), 2**63), (2**63, 2**63), (0, 0)])
def test_seeds_of_64_bits_may_have_a_sign(given: int, seed: int) -> None:
    assert asked(CompletionBody, seed=given).sampling.seed == seed
    assert not asked(CompletionBody, seed=-1).sampling.HasField("seed")
    with pytest.raises(InvalidRequest, match="seed is"):
        read_body(CompletionBody, json.dumps({"prompt": "x", "seed": -(2**70)}).encode()).requests()


def test_no_alternatives_without_logprobs() -> None:
    assert not asked(ChatBody, logprobs=False, top_logprobs=0).sampling.HasField("logprobs")
    assert not asked(ChatBody, stream_options={"include_usage": False}).sampling.ListFields()


MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TOOLS: dict[type[Any], dict[str, Any]] = {
    ChatBody: {"type": "function", "function": {"name": "f", **MARK}},
    ResponsesBody: {"type": "function", "name": "f"},
    MessagesBody: {"name": "f", "input_schema": {}},
}


@pytest.mark.parametrize("kind", TOOLS)
def test_marks_for_caches_change_nothing(kind: type[Any]) -> None:
    """Wherever Anthropic's clients, and those that speak for them, put them."""
    said = {"content": [{"type": "text", "text": "a", **MARK}, {"type": "text", "text": "b", "citations": None}]}
    turns = {"messages" if kind is not ResponsesBody else "input": [{"role": "user", **said, **MARK}]}
    system = {"system": [{"type": "text", "text": "s", **MARK}]} if kind is MessagesBody else {}
    body = read_body(kind, json.dumps(PLAIN[kind] | turns | system | MARK | {"tools": [TOOLS[kind] | MARK]}).encode())
    (request,) = body.requests()
    contents = [turn.content for turn in request.chat.messages]
    assert contents == ["s"] * bool(system) + ["a\nb"]
    assert [tool["function"]["name"] for tool in json.loads(request.chat.tools)] == ["f"]
    assert "cache_control" not in request.chat.tools
    assert body.headers == {"x-tandem-ignored": "cache_control"}


def test_refusals_may_have_marks_too() -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no", **MARK, "annotations": []}]}
    assert asked(ChatBody, messages=[TURN, said]).chat.messages[1].content == "no"


def test_an_echo_without_output() -> None:
    sampling = asked(CompletionBody, echo=True, max_tokens=0).sampling
    assert (sampling.max_tokens, sampling.HasField("prompt_logprobs"), sampling.prompt_logprobs) == (0, True, 0)
    assert not asked(CompletionBody, echo=True).sampling.HasField("prompt_logprobs")


def test_parts_of_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    parts.append({"type": "refusal", "refusal": "c"})
    silent = {"role": "tool", "content": None, "tool_call_id": "c1"}
    thinking = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]}
    chat = asked(ChatBody, messages=[{"role": "assistant", "content": parts}, thinking, silent]).chat
    assert [turn.content for turn in chat.messages] == ["a\nb\nc", "", ""]
    assert json.loads(chat.messages[1].fields)["reasoning_content"] == "Hm."


def test_tools_without_a_type() -> None:
    made = asked(ChatBody, tools=[TOOL], tool_choice={"function": {"name": "weather"}})
    assert json.loads(made.chat.tools)[0]["type"] == "function"
    assert json.loads(made.sampling.guided.json_schema)["type"] == "object"


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, lambda effort: {"reasoning_effort": effort}),
        (ResponsesBody, lambda effort: {"reasoning": {"effort": effort}}),
        (MessagesBody, lambda effort: {"output_config": {"effort": effort}}),
    ],
)
def test_efforts_go_to_the_chat_template(kind: type[Any], fields: Any) -> None:
    assert json.loads(asked(kind, **fields("high")).chat.template_kwargs) == {"reasoning_effort": "high"}
    off = asked(kind, **fields("none"), chat_template_kwargs={"x": 1}).chat.template_kwargs
    assert json.loads(off) == {"reasoning_effort": "none", "enable_thinking": False, "x": 1}
    assert not asked(kind).chat.template_kwargs


def test_a_response_takes_sampling_parameters() -> None:
    fields = {"top_k": 3, "seed": 4, "stop": ["a"], "repetition_penalty": 1.5, "min_tokens": 2, "logit_bias": {"5": 1}}
    made = asked(ResponsesBody, **fields, truncation="auto", include=["reasoning.encrypted_content"])
    sampling = made.sampling
    assert (sampling.top_k, sampling.seed, list(sampling.stop), dict(sampling.logit_bias)) == (3, 4, ["a"], {5: 1.0})
    assert (sampling.repetition_penalty, sampling.min_tokens, made.truncate_prompt_tokens) == (1.5, 2, -1)
    assert asked(ResponsesBody, structured_outputs={"regex": "a+"}).sampling.guided.regex == "a+"


def test_a_response_takes_logprobs() -> None:
    included = ["message.output_text.logprobs"]
    assert not asked(ResponsesBody, top_logprobs=0).sampling.HasField("logprobs")
    assert asked(ResponsesBody, include=included, top_logprobs=3).sampling.logprobs == 3
    sampling = asked(ResponsesBody, include=included).sampling
    assert (sampling.HasField("logprobs"), sampling.logprobs) == (True, 0)
    with pytest.raises(HttpError, match=r"top_logprobs is of use only with 'message.output_text.logprobs' in include"):
        asked(ResponsesBody, top_logprobs=3)


def test_a_message_follows_a_schema() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert json.loads(asked(MessagesBody, **fields).sampling.guided.json_schema) == SCHEMA
    assert not asked(MessagesBody, output_config={}).sampling.HasField("guided")


def test_bytes_of_a_body(gateway: OpenGateway, model: Script) -> None:
    model.begin("ok")
    body = json.dumps({"prompt": "x", "temperature": 0}).encode()
    json_type = {"content-type": "application/json"}
    for path, content, headers in (
        (COMPLETIONS + "/", body, {}),
        (COMPLETIONS, b"\xef\xbb\xbf" + body, {}),
        (COMPLETIONS, body, {"content-encoding": "identity"}),
    ):
        said = post(gateway.http, path, None, content=content, headers=json_type | headers)
        assert said.status_code == 200, said.text
    gzipped = post(gateway.http, COMPLETIONS, None, content=body, headers=json_type | {"content-encoding": "gzip"})
    assert "leave it out, or send identity" in refused(gzipped, 415)["message"]


def test_a_chat_is_tokenized_as_it_is_asked(gateway: OpenGateway, model: Script, tokenizer: Tokenizer) -> None:
    options: dict[str, Any]
    for options in (
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"chat_template_kwargs": {"think": True}},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
    ):
        body = {"messages": [TURN, {"role": "assistant", "content": "It begins"}], **options}
        model.begin("ok")
        said = answer(gateway.http, "/tokenize", **body)
        asked_for = answer(gateway.http, CHATS, **body, max_tokens=1, return_token_ids=True)
        assert said["tokens"] == asked_for["prompt_token_ids"]
        assert ("weather" in tokenizer.decode(said["tokens"])) == (options == {"tools": [TOOL]})
