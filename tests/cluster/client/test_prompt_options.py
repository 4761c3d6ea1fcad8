"""Tests prompt options of the Python clients, as keywords: for chat templates, and for tokens."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tandem.cluster.client import AsyncClient, Client
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.llm import AsyncLLM, connect
from tandem.proto import inference_pb2
from tests.cluster.fake_gateway import FakeGateway, serving

CHAT = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TEMPLATE = {
    "template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "tools": TOOLS,
}
Ask = Callable[[str, Any, Mapping[str, Any]], None]


def by_client(address: str, prompt: Any, options: Mapping[str, Any]) -> None:
    with Client(address) as client:
        list(client.generate(prompt, **options))


def by_async_client(address: str, prompt: Any, options: Mapping[str, Any]) -> None:
    async def ask() -> None:
        async with AsyncClient(address) as client:
            _ = [update async for update in client.generate(prompt, **options)]

    asyncio.run(ask())


def by_llm(address: str, prompt: Any, options: Mapping[str, Any]) -> None:
    with connect(address) as llm:
        llm.generate([prompt], **options)


def by_llm_chat(address: str, prompt: Any, options: Mapping[str, Any]) -> None:
    with connect(address) as llm:
        llm.chat(prompt, **options)


def by_async_llm(address: str, prompt: Any, options: Mapping[str, Any]) -> None:
    async def ask() -> None:
        async with AsyncLLM(address) as llm:
            await llm.chat(prompt, **options)

    asyncio.run(ask())


def sent(ask: Ask, prompt: Any, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    gateway = FakeGateway()
    with serving(gateway) as address:
        ask(address, prompt, options)
    (request,) = gateway.requests
    return request


@pytest.mark.parametrize("ask", [by_client, by_async_client, by_llm, by_llm_chat, by_async_llm])
def test_chats_take_what_their_template_does(ask: Ask) -> None:
    request = sent(ask, CHAT, TEMPLATE | {"max_tokens": 5})
    assert json.loads(request.chat.template_kwargs) == TEMPLATE["template_kwargs"]
    assert (request.chat.add_generation_prompt, request.chat.continue_final_message) == (False, True)
    assert json.loads(request.chat.tools) == TOOLS
    assert request.sampling.max_tokens == 5


@pytest.mark.parametrize("ask", [by_llm, by_llm_chat, by_async_llm])
def test_a_cluster_as_an_object_takes_a_salt_and_parts(ask: Ask) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    request = sent(ask, parts, {"cache_salt": "mine"})
    assert (request.cache_salt, request.chat.messages[0].content) == ("mine", "a\nb")


def test_what_is_not_said_is_not_sent() -> None:
    request = sent(by_client, CHAT, {})
    assert {field.name for field, _ in request.chat.ListFields()} == {"messages"}
    assert not request.HasField("add_special_tokens")
    assert not request.HasField("truncate_prompt_tokens")


def test_options_of_any_prompt() -> None:
    options = {"add_special_tokens": False, "truncate_prompt_tokens": -1, "return_prompt_token_ids": True}
    request = sent(by_client, "Hello", options)
    assert {name: getattr(request, name) for name in options} == options
    assert request.HasField("add_special_tokens")


def test_template_kwargs_may_be_json() -> None:
    assert sent(by_client, CHAT, {"template_kwargs": '{"a": 1}'}).chat.template_kwargs == '{"a": 1}'


@pytest.mark.parametrize(
    ("prompt", "option", "reason"),
    [
        ("Hello", {"add_generation_prompt": True}, "add_generation_prompt is of use only with a chat"),
        ([5, 6], {"template_kwargs": {}}, "template_kwargs is of use only with a chat"),
        (CHAT, {"template_kwargs": {"a": object()}}, "template_kwargs is .*; it must be a mapping that JSON can hold"),
        (CHAT, {"template_kwargs": 5}, "template_kwargs is 5; it must be a mapping that JSON can hold"),
        (CHAT, {"tools": {"type": "function"}}, "tools is .*; it must be a list of functions"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "prompt is .*'text'; it must be Unicode text"),
        (CHAT, {"continue_final_message": "yes"}, "continue_final_message is 'yes'; it must be true or false"),
        ("Hello", {"truncate_prompt_tokens": 1 << 31}, r"truncate_prompt_tokens is 2147483648; it must be an integer"),
        (
            "Hello",
            {"truncate_prompt_token": 1},
            "unknown sampling parameter 'truncate_prompt_token'; did you mean",
        ),
    ],
)
def test_bad_options_are_refused_before_a_call(prompt: Any, option: Mapping[str, Any], reason: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=reason):
        client.generate(prompt, **option)
