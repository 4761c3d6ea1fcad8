"""langchain-openai: chats, streams, batches, structured output and completions."""

import asyncio
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, MODEL, PROMPT, check, run

model = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model=MODEL, temperature=0, max_tokens=24, max_retries=0)
TURNS = [SystemMessage("Be short."), HumanMessage("What is a cache?")]


class Answer(BaseModel):
    """An answer."""

    size: Literal["small", "large"]
    is_fast: bool


def a_chat() -> None:
    said = model.invoke(TURNS)
    check(isinstance(said, AIMessage) and said.content, "a text", said)
    check(said.usage_metadata["output_tokens"] > 0, "usage", said.usage_metadata)
    check(said.response_metadata["finish_reason"] in ("stop", "length"), "a finish reason", said.response_metadata)
    check(model.invoke([*TURNS, said, HumanMessage("Go on.")]).content, "a second turn")


def a_stream() -> None:
    chunks = list(model.stream(TURNS, stream_usage=True))
    text = "".join(chunk.content for chunk in chunks)
    check(text == model.invoke(TURNS).content, "a stream says the same", text)
    check(any(chunk.usage_metadata for chunk in chunks), "usage in the stream", chunks[-1])


def asynchronous_calls_and_batches() -> None:
    one, two = model.batch([TURNS, TURNS])
    check(one.content == two.content, "greedy answers are alike", one, two)
    check(asyncio.run(model.ainvoke(TURNS)).content == one.content, "an asynchronous call says the same")


def structured_output() -> None:
    longer = model.model_copy(update={"max_tokens": 600})
    said = longer.with_structured_output(Answer, method="json_schema").invoke(TURNS)
    check(isinstance(said, Answer), "an object of the class", said)
    strict = longer.with_structured_output(Answer, method="json_schema", strict=True, include_raw=True).invoke(TURNS)
    check(strict["parsed"] == said and strict["parsing_error"] is None, "the same with its raw message", strict)


def log_probabilities() -> None:
    said = model.bind(logprobs=True, top_logprobs=2).invoke(TURNS)
    check(said.response_metadata["logprobs"]["content"], "log-probabilities", said.response_metadata)


def a_completion() -> None:
    completing = OpenAI(base_url=BASE_URL, api_key=API_KEY, model=MODEL, temperature=0, max_tokens=12)
    text = completing.invoke(PROMPT)
    check(text and text == "".join(completing.stream(PROMPT)), "a stream says the same", text)


if __name__ == "__main__":
    run(a_chat, a_stream, asynchronous_calls_and_batches, structured_output, log_probabilities, a_completion)
