"""openai-python: responses whole and streamed, with a schema and with a function."""

from typing import Literal

import openai
from pydantic import BaseModel, ConfigDict
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, refused, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
ASKED = {"model": MODEL, "input": CHAT[0]["content"], "max_output_tokens": 24, "temperature": 0}
FUNCTION = {
    "type": "function",
    "name": "degrees",
    "description": "The temperature of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"]


class City(BaseModel):
    city: Literal["Berlin", "Paris"]


def a_response() -> None:
    whole = client.responses.create(**ASKED)
    check(whole.object == "response" and whole.id, "a response with an id", whole)
    check(whole.status in ("completed", "incomplete"), "a status", whole.status)
    check(whole.status != "incomplete" or whole.incomplete_details.reason == "max_output_tokens", "why", whole)
    check(whole.output_text, "a text", whole)
    check(whole.usage.output_tokens > 0 and whole.usage.input_tokens > 0, "usage", whole.usage)
    turns = [*CHAT, {"role": "assistant", "content": whole.output_text}, {"role": "user", "content": "Go on."}]
    check(client.responses.create(**ASKED | {"input": turns}, instructions="Be short.").output_text, "several turns")


def a_stream() -> None:
    text = client.responses.create(**ASKED).output_text
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    check(kinds[0] == "response.created", "the first event", kinds)
    check(kinds[-1] in ("response.completed", "response.incomplete"), "the last event", kinds)
    for kind in (
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ):
        check(f"response.{kind}" in kinds, f"response.{kind}", kinds)
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    check(streamed == text, "a stream says the same", streamed, text)
    numbers = [event.sequence_number for event in events]
    check(numbers == list(range(numbers[0], numbers[0] + len(numbers))), "numbers in their order", numbers)
    check(events[-1].response.output_text == text, "the last event has all of it", events[-1])


def logprobs() -> None:
    asked = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    entries = client.responses.create(**asked).output[0].content[0].logprobs
    check(entries and all(len(entry.top_logprobs) == 2 for entry in entries), "two alternatives of each token", entries)
    check(all(entry.logprob <= 0 for entry in entries), "log-probabilities", entries)
    with client.responses.stream(**asked) as stream:
        pieces = [entry for one in stream if one.type == "response.output_text.delta" for entry in one.logprobs]
    texts = [[entry.token for entry in some] for some in (pieces, entries)]
    check(texts[0] == texts[1][: len(texts[0])], "a stream says the same", *texts)


def a_schema() -> None:
    said = client.responses.parse(**ASKED | {"max_output_tokens": 600}, text_format=Answer)
    check(isinstance(said.output_parsed, Answer), "an object of the class", said)
    with client.responses.stream(**ASKED | {"max_output_tokens": 600}, text_format=Answer) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    check("response.output_text.delta" in kinds, "the helper's events", kinds)
    check(final.output_parsed == said.output_parsed, "a stream says the same", final, said)


def a_function_call() -> None:
    asked = ASKED | {"max_output_tokens": 600, "tools": [FUNCTION], "parallel_tool_calls": False}
    named = {"type": "function", "name": "degrees"}
    for choice in ("required", named):
        whole = client.responses.create(**asked, tool_choice=choice)
        (call,) = [item for item in whole.output if item.type == "function_call"]
        check(call.name == "degrees" and call.call_id, "the function", call)
        City.model_validate_json(call.arguments)
        turns = [*CHAT, *whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "21"}]
        after = client.responses.create(**ASKED | {"input": turns, "tools": [FUNCTION], "tool_choice": "none"})
        check(after.output_text, "the function's answer goes back", after)
        events = list(client.responses.create(**asked, tool_choice=choice, stream=True))
        arguments = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
        check(arguments == call.arguments, "a stream says the same", arguments, call)
        check(any(one.type == "response.function_call_arguments.done" for one in events), "its end", events)


def errors_by_type() -> None:
    with refused(openai.BadRequestError, status_code=400):
        client.responses.create(**ASKED | {"temperature": -1})
    with refused(openai.NotFoundError, status_code=404):
        client.responses.create(**ASKED | {"model": "another"})
    with refused(openai.APIStatusError):
        client.responses.create(**ASKED, previous_response_id="resp_never_made")


if __name__ == "__main__":
    run(a_response, a_stream, logprobs, a_schema, a_function_call, errors_by_type)
