"""openai-python: tool calls that the model has to make, that it may make, and their answers."""

import asyncio
import json
from typing import Any, Literal

import openai
from openai import pydantic_function_tool
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, refused, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Berlin", "Paris"]
    is_celsius: bool


class Clock(BaseModel):
    """The time of a zone."""

    zone: Literal["UTC", "CET"]


TOOLS = [pydantic_function_tool(Weather), pydantic_function_tool(Clock)]
KINDS = {"Weather": Weather, "Clock": Clock}
ASKED: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 600, "temperature": 0, "tools": TOOLS}
ONE = {"parallel_tool_calls": False, "tool_choice": "required"}
NAMED = {"type": "function", "function": {"name": "Weather"}}


def a_required_call() -> None:
    (choice,) = client.chat.completions.create(**ASKED, **ONE).choices
    check(choice.finish_reason == "tool_calls", "finish_reason is tool_calls", choice)
    (call,) = choice.message.tool_calls
    check(call.type == "function" and call.id, "an id", call)
    KINDS[call.function.name].model_validate_json(call.function.arguments)
    check(not choice.message.content, "no text", choice.message.content)


def a_named_call() -> None:
    (choice,) = client.chat.completions.create(**ASKED, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    check(call.function.name == "Weather", "the named function", call)
    Weather.model_validate_json(call.function.arguments)
    check(choice.finish_reason in ("stop", "tool_calls"), "a finish reason", choice.finish_reason)


def a_streamed_call() -> None:
    (whole,) = client.chat.completions.create(**ASKED, **ONE).choices
    name, arguments, ids, reasons = "", "", set(), []
    for chunk in client.chat.completions.create(**ASKED, **ONE, stream=True):
        (choice,) = chunk.choices
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            check(call.index == 0, "the call's index", call)
            ids |= {call.id} - {None}
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    (call,) = whole.message.tool_calls
    check((name, arguments) == (call.function.name, call.function.arguments), "a stream says the same", name, arguments)
    check(len(ids) == 1, "one id", ids)
    check(reasons[-1] == "tool_calls" and set(reasons[:-1]) <= {None}, "the last chunk ends it", reasons)


def parsed_calls() -> None:
    (choice,) = client.chat.completions.parse(**ASKED, **ONE).choices
    (call,) = choice.message.tool_calls
    check(isinstance(call.function.parsed_arguments, Weather | Clock), "arguments of the class", call)
    with client.chat.completions.stream(**ASKED, tool_choice=NAMED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    check("tool_calls.function.arguments.done" in kinds, "the helper's events", kinds)
    (call,) = final.choices[0].message.tool_calls
    check(isinstance(call.function.parsed_arguments, Weather), "arguments of the class", call)


def answers_of_tools() -> None:
    """The call goes back as it came, with what the function gave."""
    (choice,) = client.chat.completions.create(**ASKED, **ONE).choices
    (call,) = choice.message.tool_calls
    turns = [*CHAT, choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}]
    for choosing in ("none", "auto", "required"):
        given = ASKED | {"messages": turns, "tool_choice": choosing, "max_tokens": 40}
        (after,) = client.chat.completions.create(**given).choices
        check(after.message.content is not None or after.message.tool_calls, "text or a call", after)
        check(choosing != "none" or not after.message.tool_calls, "none calls nothing", after)


def several_calls() -> None:
    (choice,) = client.chat.completions.create(**ASKED | {"max_tokens": 1200}, tool_choice="required").choices
    calls = choice.message.tool_calls
    check(calls, "calls", choice)
    check(len({call.id for call in calls}) == len(calls), "ids of their own", calls)
    if choice.finish_reason == "tool_calls":
        for call in calls:
            check(isinstance(json.loads(call.function.arguments), dict), "arguments are an object", call)


def an_asynchronous_call() -> None:
    async def calls() -> None:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY) as client:
            (choice,) = (await client.chat.completions.create(**ASKED, tool_choice=NAMED)).choices
            check(choice.message.tool_calls, "a call", choice)

    asyncio.run(calls())


def wrong_tools() -> None:
    with refused(openai.BadRequestError):
        client.chat.completions.create(**ASKED, tool_choice={"type": "function", "function": {"name": "Nothing"}})
    with refused(openai.BadRequestError, status_code=400):
        wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
        client.chat.completions.create(**ASKED | {"tools": [wrong]}, tool_choice="required")


if __name__ == "__main__":
    run(
        a_required_call,
        a_named_call,
        a_streamed_call,
        parsed_calls,
        answers_of_tools,
        several_calls,
        an_asynchronous_call,
        wrong_tools,
    )
