"""Turns a request's text, chat messages or ids into token ids."""

import json
from typing import Any

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

MAX_TEMPLATE_KWARGS = 16_384  # characters
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def prompt_tokens(tokenizer: Tokenizer | None, message: inference_pb2.GenerateRequest) -> Int64Array:
    """Returns the ids of `text`, `chat` or `token_ids`, int64 [n]. The first two need a tokenizer.

    Raises ChatTemplateError and TokenizerFailed.
    """
    if message.HasField("token_ids"):
        # A slice is a list: numpy takes thrice as long for protobuf's own type.
        return np.array(message.token_ids.ids[:], np.int64)
    assert tokenizer is not None, "the validator refuses text without one"
    if message.HasField("text"):
        special = message.add_special_tokens or not message.HasField("add_special_tokens")
        return np.array(tokenizer.encode(message.text, add_special_tokens=special), np.int64)
    chat = message.chat
    messages = [_turn(index, turn) for index, turn in enumerate(chat.messages)]
    tools, variables = _tools(chat), template_variables(chat)
    if "developer" not in tokenizer.chat_templates.choose(tools, variables).source:
        messages = [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in messages]
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    ids = tokenizer.encode_chat(
        messages,
        tools=tools,
        add_special_tokens=message.add_special_tokens,
        variables=variables,
        add_generation_prompt=begins,
        continue_final_message=chat.continue_final_message,
    )
    return np.array(ids, np.int64)


def template_variables(chat: inference_pb2.Chat) -> dict[str, Any]:
    """Returns the template's variables. Raises ChatTemplateError, which names the field."""
    text = chat.template_kwargs
    if len(text) > MAX_TEMPLATE_KWARGS:
        reason = f"has {len(text)} characters; it may have at most {MAX_TEMPLATE_KWARGS}"
        raise ChatTemplateError(f"template_kwargs {reason}")
    try:
        variables = json.loads(text or "{}")
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise ChatTemplateError(f"template_kwargs is {text!r:.80}; it must be a JSON object")
    own = [name for name in OWN_VARIABLES if name in variables]
    if own:
        raise ChatTemplateError(f"template_kwargs has {own[0]}, which is a field of its own")
    return variables


def _turn(index: int, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Returns a message in the form of templates. Raises ChatTemplateError, which names the field."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if not message.fields:
        return turn
    name = f"messages[{index}].fields"
    fields = _json(name, message.fields, dict, "a JSON object")
    if own := [field for field in turn if field in fields]:
        raise ChatTemplateError(f"{name} has {own[0]}, which is a field of its own")
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise ChatTemplateError(
            f"{name}.tool_calls is {calls!r:.80}; it must be a list of calls, each with a function that has a name "
            "and arguments as texts"
        )
    return turn | fields


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | None)
    )


def _tools(chat: inference_pb2.Chat) -> list[dict[str, Any]] | None:
    """Returns the tools. Raises ChatTemplateError, which names the field."""
    if not chat.tools:
        return None
    tools = _json("tools", chat.tools, list, "a JSON list of objects")
    if not all(isinstance(tool, dict) for tool in tools):
        raise ChatTemplateError(f"tools is {chat.tools!r:.80}; it must be a JSON list of objects")
    return tools or None


def _json(name: str, text: str, kind: type, accepted: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ChatTemplateError(f"{name} is {text!r:.80}; it must be {accepted}")
    return value
