"""Reads the bytes of a body, and says what is wrong with them."""

import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.chats import Message, TextPart
from tandem.cluster.frontends.openai.generation_body import GenerationBody, StreamOptions
from tandem.cluster.frontends.openai.guided_fields import JsonSchema, ResponseFormat, StructuredOutputs
from tandem.cluster.frontends.openai.other_fields import LONGEST_NAME, take_out
from tandem.cluster.frontends.openai.part import MAX_FIELDS, Part
from tandem.proto import inference_pb2

BodyT = TypeVar("BodyT", bound=GenerationBody)
PartT = TypeVar("PartT", bound=Part)


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
    body, ignored = read_part(kind, data)
    return body.ignoring(ignored)


def read_part(kind: type[PartT], data: bytes | bytearray) -> tuple[PartT, list[str]]:
    """A body of any kind, and the names of fields that are ignored. Raises as read_body()."""
    try:
        values = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body is {reprlib.repr(values)}; a JSON object is accepted")
    if len(values) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(values)} fields; at most {MAX_FIELDS} are accepted")
    ignored = take_out(values, kind.model_fields)
    try:
        return kind.model_validate(values), ignored
    except ValidationError as error:
        raise _refusal(kind, error.errors()[0]) from None


def _refusal(kind: type[Part], finding: Any) -> HttpError:
    """The error for one of pydantic's findings: dotted field, value received and what would be accepted."""
    reason = finding["msg"].removeprefix("Value error, ")
    if not finding["loc"]:  # of the whole body: the message names its field itself
        return HttpError(400, reason, param=reason.partition(" ")[0])
    *place, last = finding["loc"]
    if finding["type"] == "extra_forbidden":
        name = _dotted([*place, last])[:LONGEST_NAME]
        return HttpError(400, f"{name} is not supported; null is accepted", param=name, code="unknown_parameter")
    # Branches of a union stand in its place too, and mean nothing to a client.
    described = _descriptions(kind)
    names = [part for part in finding["loc"] if isinstance(part, int) or part in described]
    name, accepted = _dotted(names), described[next(part for part in reversed(names) if isinstance(part, str))]
    if finding["type"] == "value_error":
        return HttpError(400, f"{name} {reason}", param=name)
    received = "missing" if finding["type"] == "missing" else reprlib.repr(finding["input"])
    return HttpError(400, f"{name} is {received}; it must be {accepted}", param=name)


def _descriptions(kind: type[Part]) -> dict[str, str]:
    """What each field of a body and of its parts accepts."""
    parts = (Message, TextPart, StreamOptions, JsonSchema, ResponseFormat, StructuredOutputs, kind)
    fields = [one for part in parts for one in part.model_fields.items()]
    return {field.alias or name: field.description or "" for name, field in fields}


def _dotted(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
