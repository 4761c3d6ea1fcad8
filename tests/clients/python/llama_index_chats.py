"""llama-index-llms-openai-like: completions, chats, streams and structured output."""

import asyncio
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, MODEL, PROMPT, check, run

COMMON = {"model": MODEL, "api_base": BASE_URL, "api_key": API_KEY, "temperature": 0, "max_retries": 0}
completing = OpenAILike(**COMMON, is_chat_model=False, max_tokens=16, context_window=2048)
chatting = OpenAILike(
    **COMMON, is_chat_model=True, max_tokens=600, context_window=2048, should_use_structured_outputs=True
)
TURNS = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content="What is a cache?")]


class Answer(BaseModel):
    """An answer."""

    size: Literal["small", "large"]
    is_fast: bool


def a_completion() -> None:
    whole = completing.complete(PROMPT).text
    check(whole, "a text", whole)
    *_, last = completing.stream_complete(PROMPT)
    check(last.text == whole, "a stream says the same", last.text, whole)


def a_chat() -> None:
    whole = chatting.chat(TURNS, max_tokens=16).message.content
    check(whole, "a text", whole)
    *_, last = chatting.stream_chat(TURNS, max_tokens=16)
    check(last.message.content == whole, "a stream says the same", last.message.content, whole)
    said = asyncio.run(chatting.achat(TURNS, max_tokens=16)).message.content
    check(said == whole, "an asynchronous call says the same", said)


def structured_output() -> None:
    said = chatting.as_structured_llm(Answer).chat(TURNS).raw
    check(isinstance(said, Answer), "an object of the class", said)


if __name__ == "__main__":
    run(a_completion, a_chat, structured_output)
