"""litellm: its SDK with the providers `openai` and `hosted_vllm`, errors by their types, and its router."""

import asyncio
from typing import Literal

import litellm
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, CHAT, MODEL, PROMPT, check, refused, run

COMMON = {"api_base": BASE_URL, "api_key": API_KEY, "temperature": 0, "max_tokens": 16, "num_retries": 0}
NAMES = [f"openai/{MODEL}", f"hosted_vllm/{MODEL}"]


class Answer(BaseModel):
    size: Literal["small", "large"]


def a_chat() -> None:
    for name in NAMES:
        whole = litellm.completion(model=name, messages=CHAT, **COMMON)
        text = whole.choices[0].message.content
        check(text and whole.usage.completion_tokens > 0, "a text with usage", whole)
        chunks = list(litellm.completion(model=name, messages=CHAT, stream=True, **COMMON))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        check(streamed == text, "a stream says the same", streamed, text)
        check(litellm.stream_chunk_builder(chunks).choices[0].message.content == text, "its chunks make the answer")
        said = asyncio.run(litellm.acompletion(model=name, messages=CHAT, **COMMON))
        check(said.choices[0].message.content == text, "an asynchronous call says the same", said)


def structured_output() -> None:
    for name in NAMES:
        asked = COMMON | {"max_tokens": 600, "response_format": Answer}
        whole = litellm.completion(model=name, messages=CHAT, **asked)
        Answer.model_validate_json(whole.choices[0].message.content)


def a_completion() -> None:
    whole = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **COMMON)
    check(whole.choices[0].text, "a text", whole)


def errors_by_type() -> None:
    asked = {"model": NAMES[0], "messages": CHAT, **COMMON}
    with refused(litellm.BadRequestError, status_code=400):
        litellm.completion(**asked | {"temperature": -1})
    with refused(litellm.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "a b c " * 20_000}]})
    with refused(litellm.NotFoundError):
        litellm.completion(**asked | {"model": "openai/another"})
    with refused(litellm.AuthenticationError):
        litellm.completion(**asked | {"api_key": "wrong"})


def a_router() -> None:
    params = {"model": NAMES[0], "api_base": BASE_URL, "api_key": API_KEY}
    router = litellm.Router(model_list=[{"model_name": "any", "litellm_params": params}])
    check(router.completion(model="any", messages=CHAT, max_tokens=4).choices, "a choice")


if __name__ == "__main__":
    run(a_chat, structured_output, a_completion, errors_by_type, a_router)
