"""anthropic: messages whole, streamed and asynchronous, objects, tools, counted tokens, and errors by their types."""

import asyncio
from typing import Literal

import anthropic
from pydantic import BaseModel
from steps import API_KEY, CHAT, HTTP, MODEL, check, refused, run

client = anthropic.Anthropic(base_url=HTTP, api_key=API_KEY, max_retries=0)
GREEDY = {"temperature": 0}  # the API has it, and versions of the client take it no longer
ASKED = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "extra_body": GREEDY}
TOOL = {
    "name": "degrees",
    "description": "The temperature of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "degrees"}}
ANY = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


class Answer(BaseModel):
    """An answer."""

    size: Literal["small", "large"]
    is_fast: bool


def a_message() -> None:
    whole = client.messages.create(**ASKED, system="Be short.")
    check(whole.type == "message" and whole.role == "assistant" and whole.id, "a message", whole)
    check(whole.content[0].type == "text" and whole.content[0].text, "a text", whole.content)
    check(whole.stop_reason in ("end_turn", "max_tokens"), "a stop reason", whole.stop_reason)
    check(whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0, "usage", whole.usage)
    turns = [*CHAT, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Go on."}]
    check(client.messages.create(**ASKED | {"messages": turns}).content, "its own content goes back")


def a_stream() -> None:
    text = client.messages.create(**ASKED).content[0].text
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    check(kinds[:2] == ["message_start", "content_block_start"], "the first events", kinds)
    check(kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], "the last events", kinds)
    with client.messages.stream(**ASKED) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(streamed == text == final.content[0].text, "a stream says the same", streamed, text)
    check(final.usage.output_tokens > 0 and final.stop_reason, "its end has usage and a reason", final)


def an_asynchronous_call() -> None:
    async def call() -> str:
        client = anthropic.AsyncAnthropic(base_url=HTTP, api_key=API_KEY)
        async with client, client.messages.stream(**ASKED) as stream:
            return "".join([text async for text in stream.text_stream])

    check(asyncio.run(call()) == client.messages.create(**ASKED).content[0].text, "it says the same")


def a_stop_sequence() -> None:
    whole = client.messages.create(**ASKED | {"max_tokens": 300}, stop_sequences=["e"])
    check(whole.stop_reason == "stop_sequence" and whole.stop_sequence == "e", "why it ended", whole)


def an_object() -> None:
    asked = ASKED | {"max_tokens": 600}
    said = client.messages.parse(**asked, output_format=Answer)
    check(isinstance(said.parsed_output, Answer), "an object of the class", said)
    with client.messages.stream(**asked, output_format=Answer) as stream:
        final = stream.get_final_message()
    check(final.parsed_output == said.parsed_output, "a stream says the same", final, said)


def a_tool() -> None:
    for forced in (FORCED, ANY):
        whole = client.messages.create(**ASKED | {"max_tokens": 600}, **forced)
        (use,) = [block for block in whole.content if block.type == "tool_use"]
        check(whole.stop_reason == "tool_use", "stop_reason is tool_use", whole.stop_reason)
        check(use.name == "degrees" and use.input["city"] in ("Berlin", "Paris"), "an input of the schema", use)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "21"}
        turns = [*CHAT, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        check(client.messages.create(**ASKED | {"messages": turns}, tools=[TOOL]).content, "the result goes back")
        with client.messages.stream(**ASKED | {"max_tokens": 600}, **forced) as stream:
            final = stream.get_final_message()
        (streamed,) = [block for block in final.content if block.type == "tool_use"]
        check(streamed.input == use.input, "a stream says the same", streamed, use)


def counted_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens
    check(counted == client.messages.create(**ASKED).usage.input_tokens, "as many as a message counts", counted)


def errors_by_type() -> None:
    with refused(anthropic.BadRequestError, status_code=400):
        client.messages.create(**ASKED | {"max_tokens": -1})
    with refused(anthropic.NotFoundError, status_code=404):
        client.messages.create(**ASKED | {"model": "another"})
    with refused(anthropic.AuthenticationError, status_code=401):
        anthropic.Anthropic(base_url=HTTP, api_key="wrong", max_retries=0).messages.create(**ASKED)


if __name__ == "__main__":
    run(a_message, a_stream, an_asynchronous_call, a_stop_sequence, an_object, a_tool, counted_tokens, errors_by_type)
