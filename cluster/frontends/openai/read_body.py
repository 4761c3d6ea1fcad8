"""Reads the bytes of a body, and says what is wrong with them."""

import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import from_json
from typing_extensions import TypeAliasType

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.body_object import MAX_FIELDS, BodyObject
from tandem.cluster.frontends.openai.other_fields import LONGEST_NAME, take_out
from tandem.proto import inference_pb2

BOM = b"\xef\xbb\xbf"  # with which some editors and languages begin UTF-8
EXACT = 2**53  # below it each whole number is a float
BodyT = TypeVar("BodyT", bound=AskingBody)
ObjectT = TypeVar("ObjectT", bound=BodyObject)


def read_requests(
    kind: type[BodyT], data: bytes | bytearray, max_tokens: int
) -> tuple[BodyT, list[inference_pb2.GenerateRequest]]:
    """Returns the body without its prompts, and the gateway's request for each prompt.

    max_tokens: of the longest prompt with its output. Raises HttpError, as read_body().
    """
    body = read_body(kind, data)
    body.check_length(max_tokens)
    try:
        requests = body.requests()
        return body.without_prompt(), requests
    except InvalidRequest as error:
        raise body.blame(error) from error


def read_body(kind: type[BodyT], data: bytes | bytearray) -> BodyT:
    """Raises HttpError, which names the field, the value and what it must be."""
    body, ignored = read_object(kind, data)
    return body.ignoring(ignored)


def read_object(kind: type[ObjectT], data: bytes | bytearray) -> tuple[ObjectT, list[str]]:
    """Reads a body of any kind. Returns it, and the names of fields that are ignored. Raises as read_body()."""
    try:
        values = from_json(data[len(BOM) :] if data.startswith(BOM) else data, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, f"the body is {reprlib.repr(values)}; it must be a JSON object")
    if len(values) > MAX_FIELDS:
        raise HttpError(400, f"the body has {len(values)} fields; it may have at most {MAX_FIELDS}")
    values = {name: _whole(value) for name, value in values.items()}
    ignored = take_out(values, kind.model_fields)
    return checked(kind, values), ignored


def _whole(value: Any) -> Any:
    """Some languages write whole numbers as 8.0."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT
    return int(value) if is_whole else value


def checked(kind: type[ObjectT], values: dict[str, Any]) -> ObjectT:
    """Makes a body from these fields. Raises HttpError, as read_body()."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(kind, error.errors()[0]) from None


def _refusal(kind: type[BodyObject], finding: Any) -> HttpError:
    """Makes the error for one of pydantic's findings: dotted field, value received and what it must be."""
    reason = finding["msg"].removeprefix("Value error, ")
    if not finding["loc"]:  # of the whole body: the message names its field itself
        return HttpError(400, reason, param=reason.partition(" ")[0])
    if finding["type"] == "extra_forbidden":
        *place, last = finding["loc"]
        name = _dotted([*_described(kind, place)[0], last])[:LONGEST_NAME]
        return HttpError(400, f"{name} is not supported; it must be null", param=name, code="unknown_parameter")
    names, accepted = _described(kind, finding["loc"])
    name = _dotted(names)
    if finding["type"] == "value_error":
        return HttpError(400, f"{name} {reason}", param=name)
    received = "missing" if finding["type"] == "missing" else reprlib.repr(finding["input"])
    return HttpError(400, f"{name} is {received}; it must be {accepted}", param=name)


def _described(kind: type[BodyObject], place: Sequence[str | int]) -> tuple[list[str | int], str]:
    """The fields and indices of a place in a body, and what the last field accepts.

    Branches of a union stand in pydantic's places too, and mean nothing to a client.
    """
    parts, names, accepted = [kind], list[str | int](), ""
    for step in place:
        fields = [field for part in parts for name, field in part.model_fields.items() if step == (field.alias or name)]
        if fields:
            accepted = fields[0].description or ""
            parts = [part for field in fields for part in _parts_of(field.annotation)]
        if fields or isinstance(step, int):
            names.append(step)
    return names, accepted


def _parts_of(annotation: Any) -> list[type[BodyObject]]:
    """Returns the parts that a field may hold, also in lists."""
    if isinstance(annotation, TypeAliasType):
        return _parts_of(annotation.__value__)
    if isinstance(annotation, type) and issubclass(annotation, BodyObject):
        return [annotation]
    return [part for one in get_args(annotation) for part in _parts_of(one)]


def _dotted(place: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
