"""Reads the bytes of a body, and says what is wrong with them."""

import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.chats import Message, TextPart
from tandem.cluster.frontends.openai.generation_body import GenerationBody, StreamOptions
from tandem.cluster.frontends.openai.part import MAX_FIELDS
from tandem.proto import inference_pb2

HARMLESS = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Parameters that name a request or its owner, and change no answer."""

ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_special_tokens": (True,),
        "audio": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_logprobs": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "verbosity": (),
        "web_search_options": (),
    }
)
"""Parameters that are not supported here, with the values that ask for nothing."""

LONGEST_NAME = 80  # characters of an unknown field that an answer shows
BodyT = TypeVar("BodyT", bound=GenerationBody)


def read_requests(
    kind: type[BodyT], data: bytes | bytearray, max_tokens: int
) -> tuple[BodyT, list[inference_pb2.GenerateRequest]]:
    """The body without its prompts, and the gateway's request for each of them.

    max_tokens: of the longest prompt with its output. Raises HttpError, as read_body().
    """
    body = read_body(kind, data)
    body.check_length(max_tokens)
    try:
        return body.without_prompt(), body.requests()
    except InvalidRequest as error:
        raise body.blame(error) from error


def read_body(kind: type[BodyT], data: bytes | bytearray) -> BodyT:
    """Raises HttpError, which names the field, the value and what would be accepted."""
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body is {reprlib.repr(values)}; a JSON object is accepted")
    if len(values) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(values)} fields; at most {MAX_FIELDS} are accepted")
    for name, accepted in ONLY.items():
        if name not in kind.model_fields:
            _check_unsupported(name, values.pop(name, None), accepted)
    for name in HARMLESS:
        values.pop(name, None)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error.errors()[0]) from None


def _check_unsupported(name: str, value: object, accepted: Sequence[object]) -> None:
    if value is not None and value not in accepted:
        values = " or ".join(map(json.dumps, [*accepted, None]))
        raise HttpError(400, f"{name} is {reprlib.repr(value)}; only {values} is accepted here", param=name)


def _refusal(kind: type[GenerationBody], finding: Any) -> HttpError:
    """The error for one of pydantic's findings: dotted field, value received and what would be accepted."""
    reason = finding["msg"].removeprefix("Value error, ")
    if not finding["loc"]:  # of the whole body: the message names its field itself
        return HttpError(400, reason, param=reason.partition(" ")[0])
    *place, last = finding["loc"]
    if finding["type"] == "extra_forbidden":
        near = difflib.get_close_matches(last[:LONGEST_NAME], kind.model_fields, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = f"; {hint}known: {', '.join([*kind.model_fields, *HARMLESS])}" if not place else ""
        name = _dotted([*place, last])[:LONGEST_NAME]
        return HttpError(400, f"unknown parameter {name}{known}", param=name, code="unknown_parameter")
    # Branches of a union stand in its place too, and mean nothing to a client.
    described = _descriptions(kind)
    names = [part for part in finding["loc"] if isinstance(part, int) or part in described]
    name, accepted = _dotted(names), described[next(part for part in reversed(names) if isinstance(part, str))]
    if finding["type"] == "value_error":
        return HttpError(400, f"{name} {reason}", param=name)
    received = "missing" if finding["type"] == "missing" else reprlib.repr(finding["input"])
    return HttpError(400, f"{name} is {received}; it must be {accepted}", param=name)


def _descriptions(kind: type[GenerationBody]) -> dict[str, str]:
    """What each field of a body and of its parts accepts."""
    parts = (Message, TextPart, StreamOptions, kind)
    return {name: field.description or "" for part in parts for name, field in part.model_fields.items()}


def _dotted(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
