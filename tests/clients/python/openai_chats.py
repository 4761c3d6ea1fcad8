"""openai-python: chats whole, streamed and asynchronous, structured output, and errors by their types."""

import asyncio
import json
from typing import Literal

import openai
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, CHAT, MODEL, check, refused, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
GREEDY = {"model": MODEL, "messages": CHAT, "max_tokens": 24, "temperature": 0}


class Answer(BaseModel):
    size: Literal["small", "large"]
    is_fast: bool
    count: Literal[1, 2, 3]


def a_chat() -> None:
    whole = client.chat.completions.create(**GREEDY)
    check(whole.object == "chat.completion" and whole.model == MODEL, "object and model", whole)
    (choice,) = whole.choices
    check(choice.message.role == "assistant" and choice.message.content, "an assistant's text", choice)
    check(choice.finish_reason in ("stop", "length"), "a finish reason", choice.finish_reason)
    usage = whole.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage adds up", usage)
    check(whole.to_dict(), "the answer as a dictionary")
    check(client.chat.completions.create(**GREEDY).choices[0].message.content == choice.message.content, "the same")


def a_stream() -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    check(last.choices == [] and last.usage == whole.usage, "the last chunk has the usage", last)
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    check(text == whole.choices[0].message.content, "a stream says what the whole answer says", text)
    check(parts[0].choices[0].delta.role == "assistant", "the first chunk has the role", parts[0])
    check([part.choices[0].finish_reason for part in parts][-1] == whole.choices[0].finish_reason, "finish reason")


def a_stream_that_the_client_closes() -> None:
    with client.chat.completions.create(**GREEDY | {"max_tokens": 1000}, stream=True) as stream:
        next(iter(stream))
    check(client.chat.completions.create(**GREEDY).choices, "the server goes on")


def a_stream_of_events() -> None:
    stopped = GREEDY | {"stop": "e", "max_tokens": 200}  # the helper raises for an answer that max_tokens cuts off
    with client.chat.completions.stream(**stopped) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    check({"chunk", "content.done"} <= kinds, "the helper's events", kinds)
    whole = client.chat.completions.create(**stopped)
    check(final.choices[0].message.content == whole.choices[0].message.content, "the helper's text", final)


def asynchronous_calls() -> None:
    async def calls() -> None:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as client:
            wholes = await asyncio.gather(*(client.chat.completions.create(**GREEDY) for _ in range(8)))
            texts = {whole.choices[0].message.content for whole in wholes}
            check(len(texts) == 1, "greedy answers are alike", texts)
            stream = await client.chat.completions.create(**GREEDY, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            check({text} == texts, "a stream says the same", text, texts)

    asyncio.run(calls())


def several_answers() -> None:
    drawn = GREEDY | {"temperature": 1.0, "n": 3, "seed": 5}
    whole = client.chat.completions.create(**drawn)
    check([choice.index for choice in whole.choices] == [0, 1, 2], "three choices", whole)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**drawn, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    check(texts == [choice.message.content for choice in whole.choices], "a seed repeats them", texts)


def log_probabilities() -> None:
    (choice,) = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices
    content = choice.logprobs.content
    check("".join(entry.token for entry in content) == choice.message.content, "tokens make the text", content)
    check(all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content), "alternatives", content)
    streamed = []
    for chunk in client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    check([one.token for one in streamed] == [one.token for one in content], "a stream has them, too", streamed)


def sampling_parameters() -> None:
    (choice,) = client.chat.completions.create(
        **GREEDY, stop=[" "], frequency_penalty=0.5, presence_penalty=0.5
    ).choices
    check(" " not in choice.message.content.strip(), "a stop ends the text", choice)
    options = {"max_completion_tokens": 4, "top_p": 0.9, "logit_bias": {"7": -100}, "user": "me", "seed": 3}
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
    check(whole.usage.completion_tokens <= 4, "max_completion_tokens", whole.usage)
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "return_token_ids": True}
    (choice,) = client.chat.completions.create(**GREEDY, extra_body=extra).choices
    check(choice.token_ids, "extra_body reaches the server", choice)


def content_in_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    said = [client.chat.completions.create(**GREEDY | {"messages": given}).choices[0] for given in (CHAT, parts)]
    check(said[0].message.content == said[1].message.content, "parts of text are a text", said)
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi.", "name": "ann"},
        {"role": "assistant", "content": "Hello."},
        *CHAT,
    ]
    check(client.chat.completions.create(**GREEDY | {"messages": turns}).choices[0].message, "several turns")


def an_answer_that_goes_back() -> None:
    """Programs append the message as it came to the next call's messages."""
    (choice,) = client.chat.completions.create(**GREEDY).choices
    turns = [*CHAT, choice.message, {"role": "user", "content": "Go on."}]
    check(client.chat.completions.create(**GREEDY | {"messages": turns}).choices, "its own message is taken")


def a_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    (choice,) = client.chat.completions.create(**GREEDY | {"max_tokens": 600}, response_format=form).choices
    Answer.model_validate_json(choice.message.content)
    asked = GREEDY | {"max_tokens": 100, "response_format": {"type": "json_object"}}
    (choice,) = client.chat.completions.create(**asked).choices
    if choice.finish_reason == "stop":
        check(isinstance(json.loads(choice.message.content), dict), "an object", choice)


def parsed() -> None:
    asked = GREEDY | {"max_tokens": 600, "response_format": Answer}
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        (choice,) = parse(**asked).choices
        check(isinstance(choice.message.parsed, Answer), "an object of the class", choice)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    check(isinstance(final.choices[0].message.parsed, Answer), "a stream's object", final)


def errors_by_type() -> None:
    with refused(openai.BadRequestError, status_code=400, param="temperature"):
        client.chat.completions.create(**GREEDY | {"temperature": -1})
    with refused(openai.BadRequestError, code="context_length_exceeded", param="messages"):
        client.chat.completions.create(**GREEDY | {"messages": [{"role": "user", "content": "a b c " * 20_000}]})
    with refused(openai.NotFoundError, status_code=404, code="model_not_found"):
        client.chat.completions.create(**GREEDY | {"model": "another"})
    with refused(openai.NotFoundError, status_code=404):
        client.embeddings.create(model=MODEL, input="a")
    with refused(openai.AuthenticationError, status_code=401):
        openai.OpenAI(base_url=BASE_URL, api_key="wrong", max_retries=0).chat.completions.create(**GREEDY)
    with refused(openai.BadRequestError):
        client.chat.completions.create(**GREEDY | {"messages": []})
    with refused(openai.BadRequestError, param="response_format"):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}
        client.chat.completions.create(**GREEDY, response_format=form)
    with refused(openai.BadRequestError, param="temperature"):
        list(client.chat.completions.create(**GREEDY | {"temperature": -1}, stream=True))


def raw_answers() -> None:
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_headers={"x-request-id": "mine-7"})
    check(raw.request_id == "mine-7", "x-request-id comes back", raw.request_id)
    check(raw.parse().id.startswith("chatcmpl-"), "an id", raw.parse().id)
    check(client.chat.completions.create(**GREEDY)._request_id, "an id of its own")


if __name__ == "__main__":
    run(
        a_chat,
        a_stream,
        a_stream_that_the_client_closes,
        a_stream_of_events,
        asynchronous_calls,
        several_answers,
        log_probabilities,
        sampling_parameters,
        content_in_parts,
        an_answer_that_goes_back,
        a_schema,
        parsed,
        errors_by_type,
        raw_answers,
    )
