"""langchain-openai: bind_tools, and structured output through a tool."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import API_KEY, BASE_URL, MODEL, check, run

model = ChatOpenAI(base_url=BASE_URL, api_key=API_KEY, model=MODEL, temperature=0, max_tokens=600, max_retries=0)
TURNS = [HumanMessage("How warm is it?")]


@tool
def degrees(city: Literal["Berlin", "Paris"], is_celsius: bool) -> str:
    """The temperature of a city."""
    return f"{city}: 21, {is_celsius}"


class Answer(BaseModel):
    """An answer."""

    size: Literal["small", "large"]


def a_bound_tool() -> None:
    for choice in ("required", "any", "degrees"):
        said = model.bind_tools([degrees], tool_choice=choice, parallel_tool_calls=False).invoke(TURNS)
        (call,) = said.tool_calls
        check(call["name"] == "degrees" and not said.invalid_tool_calls, "a call", said)
        answer = degrees.invoke(call)
        check(isinstance(answer, ToolMessage), "the tool takes the arguments", answer)
        after = model.bind_tools([degrees]).bind(max_tokens=16).invoke([*TURNS, said, answer])
        check(after.content is not None, "the answer of the tool goes back", after)


def a_streamed_call() -> None:
    bound = model.bind_tools([degrees], tool_choice="degrees")
    whole = None
    for chunk in bound.stream(TURNS):
        whole = chunk if whole is None else whole + chunk
    check(whole.tool_calls[0]["args"] == bound.invoke(TURNS).tool_calls[0]["args"], "a stream says the same", whole)


def structured_output_by_a_tool() -> None:
    said = model.with_structured_output(Answer, method="function_calling").invoke(TURNS)
    check(isinstance(said, Answer), "an object of the class", said)


if __name__ == "__main__":
    run(a_bound_tool, a_streamed_call, structured_output_by_a_tool)
