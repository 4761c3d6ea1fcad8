"""openai-agents: an agent that calls one tool and then answers, over chats."""

import asyncio
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from steps import API_KEY, BASE_URL, MODEL, check, run

set_tracing_disabled(True)
called: list[str] = []


@function_tool
def degrees(city: Literal["Berlin", "Paris"]) -> str:
    """The temperature of a city."""
    called.append(city)
    return f"{city}: 21"


def agent(kind: type) -> Agent:
    """Makes an agent whose first answer has to be a call; then it answers with a text."""
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300, temperature=0)
    model = kind(model=MODEL, openai_client=client)
    return Agent(name="weather", instructions="Be short.", model=model, tools=[degrees], model_settings=settings)


def checked(kind: type) -> None:
    called.clear()
    said = asyncio.run(Runner.run(agent(kind), "How warm is it?", max_turns=3))
    check(called, "the tool was called", said)
    check(isinstance(said.final_output, str), "a text ends the run", said)


def a_run_over_chats() -> None:
    checked(OpenAIChatCompletionsModel)


def a_streamed_run_over_chats() -> None:
    async def streamed() -> list[str]:
        running = Runner.run_streamed(agent(OpenAIChatCompletionsModel), "How warm is it?", max_turns=3)
        return [event.type async for event in running.stream_events()]

    called.clear()
    kinds = asyncio.run(streamed())
    check(called and "raw_response_event" in kinds, "events and a call", kinds)


if __name__ == "__main__":
    run(a_run_over_chats, a_streamed_run_over_chats)
