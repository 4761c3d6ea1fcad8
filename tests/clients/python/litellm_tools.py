"""litellm: a tool that the model has to call, whole and streamed, by two providers."""

import json
from typing import Any

import litellm
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, run

NAMES = [f"openai/{MODEL}", f"hosted_vllm/{MODEL}"]
CITY = {"type": "string", "enum": ["Berlin", "Paris"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "degrees", "description": "The temperature.", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {
    "api_base": BASE_URL,
    "api_key": API_KEY,
    "messages": CHAT,
    "max_tokens": 600,
    "temperature": 0,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "degrees"}},
}


def a_call() -> None:
    for name in NAMES:
        message = litellm.completion(model=name, **ASKED).choices[0].message
        (call,) = message.tool_calls
        check(json.loads(call.function.arguments)["city"] in CITY["enum"], "arguments of the schema", call)
        turns = [*CHAT, message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
        after = litellm.completion(model=name, **ASKED | {"messages": turns, "tool_choice": "none", "max_tokens": 8})
        check(after.choices[0].message.content is not None, "the answer of the tool goes back", after)


def a_streamed_call() -> None:
    for name in NAMES:
        (call,) = litellm.completion(model=name, **ASKED).choices[0].message.tool_calls
        whole = litellm.stream_chunk_builder(list(litellm.completion(model=name, stream=True, **ASKED)))
        (streamed,) = whole.choices[0].message.tool_calls
        check(streamed.function.arguments == call.function.arguments, "a stream says the same", streamed, call)


if __name__ == "__main__":
    run(a_call, a_streamed_call)
