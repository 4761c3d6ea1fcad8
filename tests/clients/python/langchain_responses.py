"""langchain-openai over responses: text, a stream, a schema and a tool."""

from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, MODEL, check, run

COMMON = {"base_url": BASE_URL, "api_key": API_KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**COMMON, max_tokens=600, use_responses_api=True)
short = ChatOpenAI(**COMMON, max_tokens=24, use_responses_api=True)
TURNS = [HumanMessage("What is a cache?")]


class Answer(BaseModel):
    """An answer."""

    size: Literal["small", "large"]


@tool
def degrees(city: Literal["Berlin", "Paris"]) -> str:
    """The temperature of a city."""
    return f"{city}: 21"


def a_chat() -> None:
    said = short.invoke(TURNS)
    check(said.text and said.usage_metadata["output_tokens"] > 0, "a text with usage", said)
    check(short.invoke([*TURNS, said, HumanMessage("Go on.")]).text, "its own message goes back")


def a_stream() -> None:
    text = "".join(chunk.text for chunk in short.stream(TURNS))
    check(text == short.invoke(TURNS).text, "a stream says the same", text)


def structured_output() -> None:
    said = model.with_structured_output(Answer, method="json_schema").invoke(TURNS)
    check(isinstance(said, Answer), "an object of the class", said)


def a_tool() -> None:
    said = model.bind_tools([degrees], tool_choice="degrees", parallel_tool_calls=False).invoke(TURNS)
    (call,) = said.tool_calls
    after = short.bind_tools([degrees], tool_choice="none").invoke([*TURNS, said, degrees.invoke(call)])
    check(after.text, "the answer of the tool goes back", after)


if __name__ == "__main__":
    run(a_chat, a_stream, structured_output, a_tool)
