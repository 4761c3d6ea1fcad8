"""llama-index-llms-openai-like: a tool that the model has to call."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from steps import API_KEY, BASE_URL, MODEL, check, run

model = OpenAILike(
    model=MODEL,
    api_base=BASE_URL,
    api_key=API_KEY,
    temperature=0,
    max_tokens=600,
    context_window=2048,
    is_chat_model=True,
    is_function_calling_model=True,
)


def degrees(city: Literal["Berlin", "Paris"]) -> str:
    """The temperature of a city."""
    return f"{city}: 21"


TOOL = FunctionTool.from_defaults(fn=degrees)
TURNS = [ChatMessage(role="user", content="How warm is it?")]


def a_call() -> None:
    said = model.chat_with_tools([TOOL], chat_history=TURNS, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(said)
    check(call.tool_name == "degrees" and call.tool_kwargs["city"] in ("Berlin", "Paris"), "a call", call)
    result = ChatMessage(role="tool", content="21", additional_kwargs={"tool_call_id": call.tool_id})
    after = model.chat([*TURNS, said.message, result], max_tokens=8)
    check(after.message.content is not None, "the answer of the tool goes back", after)


if __name__ == "__main__":
    run(a_call)
