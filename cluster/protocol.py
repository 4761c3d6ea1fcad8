"""The gateway's protocol for both of its ends: metadata keys, and requests from Python values."""

import difflib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from tandem.cluster.errors import InvalidRequest
from tandem.proto import inference_pb2
from tandem.proto.sampling import Sampling


@dataclass(frozen=True)
class Fork:
    """A prompt of the first `position` tokens, prompt and output, of a running request, followed by token_ids. See Fork
    in inference.proto.

    position None: all that the parent's client has been sent. index: of the parent's answer.
    """

    request_id: str
    position: int | None = None
    token_ids: Sequence[int] = ()
    index: int = 0


WrittenPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
Prompt = WrittenPrompt | Fork
HalfPrompt = str | Sequence[int]
HALVES = ("encoder_prompt", "decoder_prompt")
"""Options of a model with an encoder. Each is text or token ids."""

CLIENT_ID_KEY = "client-id"
MAX_MESSAGES = 16_384  # of a chat: whoever walks them holds up others
TOKEN_IDS_ONLY = "the checkpoint has no tokenizer.json; send token_ids"  # other frontends say it in their words
CLUSTER_ENDS = "the cluster ends: "  # so begins the text of UNAVAILABLE that a gateway answers, and no connection
ACCEPTED = MappingProxyType(
    {
        FieldDescriptor.TYPE_UINT32: "an integer in [0, 2^32)",
        FieldDescriptor.TYPE_INT32: "an integer in [-2^31, 2^31)",
        FieldDescriptor.TYPE_UINT64: "an integer in [0, 2^64)",
        FieldDescriptor.TYPE_FLOAT: "a number",
        FieldDescriptor.TYPE_BOOL: "true or false",
        FieldDescriptor.TYPE_STRING: "Unicode text",
    }
)

ACCEPTED_BY_NAME = MappingProxyType(
    {
        "logit_bias": "a number for each token id in [0, 2^32)",
        "bad_words_ids": "a list of integers in [0, 2^32)",
        "sliding": "an object with window and sinks, integers in [0, 2^32)",
        "guided": "one of json_schema, regex and grammar, as text, or choice, a list of texts",
    }
)
AS_JSON: Mapping[str, tuple[type, Callable[[Any], object], str]] = MappingProxyType(
    {
        "template_kwargs": (Mapping, dict, "a mapping that JSON can hold"),
        "tools": (Sequence, list, "a list of functions, as OpenAI describes them, that JSON can hold"),
    }
)
"""Options that travel as JSON: their type, the conversion, and the type in words. JSON text works, too."""


class PromptOptions(TypedDict, total=False):
    """Options of a prompt. The last four apply to chats only. With encoder_prompt set, prompt is None."""

    add_special_tokens: bool
    truncate_prompt_tokens: int
    return_prompt_token_ids: bool
    service_tier: str
    model: str
    encoder_prompt: HalfPrompt
    decoder_prompt: HalfPrompt
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | str


PROMPT_OPTIONS = tuple(PromptOptions.__annotations__)


class Options(Sampling, PromptOptions, total=False):
    """All options of one request, for type checkers."""


def accepted_value(name: str) -> str:
    """Describes the values that a sampling parameter's field can hold. KeyError for an unknown parameter."""
    return ACCEPTED_BY_NAME.get(name) or ACCEPTED[inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name].type]


def build_request(
    prompt: Prompt | None, sampling: Mapping[str, Any], request_id: str | None, cache_salt: str | None = None
) -> inference_pb2.GenerateRequest:
    """prompt: text, token ids, chat messages with role and content, or a Fork; None with encoder_prompt. sampling: by
    the names of Options. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest()
    for field, text in (("request_id", request_id), ("cache_salt", cache_salt)):
        try:
            setattr(request, field, text or "")
        except (TypeError, ValueError):
            raise InvalidRequest(f"{field} is {text!r:.80}; it must be Unicode text") from None
    if prompt is not None or "encoder_prompt" not in sampling:
        _set_prompt(request, prompt)
    known = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name in PROMPT_OPTIONS:
            _set_option(request, name, value)
            continue
        if name not in known:
            names = (*known, *PROMPT_OPTIONS)
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidRequest(f"unknown sampling parameter {name!r}; {hint}known: {', '.join(names)}")
        one: Any = [value] if known[name].is_repeated and isinstance(value, str) else value
        try:
            if name == "bad_words_ids":
                one = [inference_pb2.TokenIds(ids=word) for word in one]
            elif name == "guided":
                one = _guided(value)
            elif name == "sliding":
                one = inference_pb2.SlidingWindow(**cast(Any, value))
            request.sampling.MergeFrom(inference_pb2.SamplingParams(**{name: one}))
        except (TypeError, ValueError):
            which = "each" if known[name].is_repeated and name != "logit_bias" else "it"
            raise InvalidRequest(f"sampling.{name} is {value!r:.80}; {which} must be {accepted_value(name)}") from None
    return request


def _set_option(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    """One of PROMPT_OPTIONS."""
    if name in HALVES:
        _set_half(getattr(request, name), name, value)
        return
    holder: Any = request
    if name not in request.DESCRIPTOR.fields_by_name:
        if not request.HasField("chat"):
            raise InvalidRequest(f"{name} is of use only with a chat; prompt is no list of messages")
        holder = request.chat
    held: Any = value
    try:
        if name in AS_JSON and not isinstance(value, str):
            kind, made, _ = AS_JSON[name]
            held = json.dumps(made(value)) if isinstance(value, kind) else None  # which no field takes
        setattr(holder, name, held)
    except (TypeError, ValueError):
        accepted = AS_JSON[name][-1] if name in AS_JSON else ACCEPTED[holder.DESCRIPTOR.fields_by_name[name].type]
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be {accepted}") from None


def _set_half(half: inference_pb2.Prompt, name: str, value: Any) -> None:
    """One of HALVES."""
    try:
        if isinstance(value, str):
            half.text = value
        else:
            half.token_bytes = struct.pack(f"<{len(value)}I", *value)
    except (TypeError, ValueError, struct.error):
        raise InvalidRequest(f"{name} is {value!r:.80}; it must be Unicode text or token ids in [0, 2^32)") from None


def _guided(value: Any) -> inference_pb2.Guided:
    """Makes the message. A schema may be a mapping, too. Next to its kind it may have thinking, by the names of that
    message."""
    thinking = value.get("thinking")
    ((kind, given),) = ((name, held) for name, held in value.items() if name != "thinking")
    content: Any = given
    if kind == "choice":
        content = inference_pb2.Choice(texts=content)
    elif kind == "json_schema" and isinstance(content, Mapping):
        content = json.dumps(content)
    made = inference_pb2.Guided(**{kind: content})
    if thinking is not None:
        made.thinking.CopyFrom(inference_pb2.Thinking(**thinking))
    return made


def _message(turn: Mapping[str, Any]) -> inference_pb2.ChatMessage:
    """Makes the message. Fields other than role and content go to the template: tool_calls, say."""
    role, content = turn["role"], turn.get("content")
    rest = {name: value for name, value in turn.items() if name not in ("role", "content")}
    fields = json.dumps(rest) if rest else ""
    if isinstance(content, Sequence) and not isinstance(content, str):  # parts, joined as the HTTP door joins them
        content = "\n".join(part["text"] for part in content)
    return inference_pb2.ChatMessage(role=role, content="" if content is None and rest else content, fields=fields)


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt | None) -> None:
    items: Any = prompt
    try:
        if isinstance(items, str):
            request.text = items
        elif isinstance(items, Fork):
            request.fork.CopyFrom(inference_pb2.Fork(**vars(items)))
        elif len(items) and isinstance(items[0], Mapping):
            request.chat.messages.extend(map(_message, items))
        else:
            request.token_bytes = struct.pack(f"<{len(items)}I", *items)
    except (TypeError, ValueError, KeyError, struct.error) as error:
        raise InvalidRequest(
            f"prompt is {items!r:.80}: {error}; it must be Unicode text, token ids in [0, 2^32), a list of chat "
            "messages or a Fork"
        ) from None
