"""The calls whose cost `tests/benchmarks/loop_lag.py` measures, each near a bound of what the gateway takes.

A kind is a list of calls, which are made at once. The worker says a kind's `script`, over and over.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDE = "x" * 128  # a token; all others are bytes
COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATE = "/tandem.v1.Inference/Generate"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
USER = [{"role": "user", "content": "?"}]
GONE_SECONDS = 0.5  # after which an impatient client goes away
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>'


@dataclass(frozen=True)
class Call:
    """path: of HTTP; GENERATE is a call over gRPC. body: the JSON, or the keywords of AsyncClient.generate."""

    path: str
    body: Any
    leaves: bool = False  # the client goes away after GONE_SECONDS


@dataclass(frozen=True)
class Kind:
    calls: Sequence[Call]
    script: str = "abcdefgh"


KINDS: dict[str, Callable[[], Kind]] = {}


def kind(make: Callable[[], Kind]) -> Callable[[], Kind]:
    """Registers it by its name."""
    KINDS[make.__name__] = make
    return make


def _completion(**body: Any) -> Call:
    return Call(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True, **body})


def _chat(path: str = CHATS, **body: Any) -> Call:
    return Call(path, {"messages": USER, "max_tokens": 16, **body})


def _nested(size: int) -> str:
    """A tool call whose arguments have so many brackets."""
    return '<tool_call>{"name": "f", "arguments": {"a": [' + "[1]," * (size // 4) + "[1]]}}</tool_call>"


SIXTY: dict[str, Any] = {"prompt": [[5 + one % 9] * 60 for one in range(60)], "max_tokens": 1920}
LONG: dict[str, Any] = {"prompt": [1 + one % 250 for one in range(32_768)], "max_tokens": 1}


@kind
def small_answers() -> Kind:
    """The base case, which all others are compared with."""
    return Kind([_completion() for _ in range(64)])


@kind
def whole_logprobs() -> Kind:
    return Kind([_completion(**SIXTY, echo=True, logprobs=20)])


@kind
def streamed_logprobs() -> Kind:
    return Kind([_completion(**SIXTY, echo=True, logprobs=20, stream=True)])


@kind
def whole_chat_logprobs() -> Kind:
    return Kind([_chat(n=32, logprobs=True, top_logprobs=20, max_tokens=1024)])


@kind
def whole_responses_logprobs() -> Kind:
    body = {"input": "?", "max_output_tokens": 16_384, "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    return Kind([Call(RESPONSES, body)])


@kind
def streamed_responses_logprobs() -> Kind:
    (call,) = whole_responses_logprobs().calls
    return Kind([Call(RESPONSES, {**call.body, "stream": True})])


@kind
def whole_text() -> Kind:
    """13 MB of it."""
    return Kind([_completion(max_tokens=100_000)], WIDE)


@kind
def whole_message() -> Kind:
    return Kind([_chat(MESSAGES, max_tokens=100_000)], WIDE)


@kind
def streamed_response() -> Kind:
    """A streamed response, whose last events repeat all of the text."""
    return Kind([Call(RESPONSES, {"input": "?", "max_output_tokens": 100_000, "stream": True})], WIDE)


@kind
def whole_token_ids() -> Kind:
    many = {"prompt": [[5, 6, 7]] * 128, "max_tokens": 1024}
    return Kind([_completion(**many, return_token_ids=True), _completion(**LONG, return_token_ids=True)])


@kind
def whole_prompt_logprobs() -> Kind:
    return Kind([_completion(**LONG, prompt_logprobs=20)])


@kind
def streamed_prompt_logprobs() -> Kind:
    return Kind([_completion(**LONG, prompt_logprobs=20, stream=True)])


@kind
def echoed_logprobs() -> Kind:
    return Kind([_completion(**LONG, echo=True, logprobs=20)])


@kind
def grpc_prompt_logprobs() -> Kind:
    return Kind([Call(GENERATE, {**LONG, "prompt_logprobs": 20})])


@kind
def whole_best_of() -> Kind:
    return Kind([_completion(best_of=16, n=8, logprobs=20, max_tokens=4096)])


@kind
def grpc_best_of() -> Kind:
    return Kind([Call(GENERATE, {"prompt": [5, 6, 7], "best_of": 16, "n": 8, "logprobs": 20, "max_tokens": 2048})])


@kind
def grpc_logprobs() -> Kind:
    body = {"prompt": [5, 6, 7], "logprobs": 20, "max_tokens": 4096}
    return Kind([Call(GENERATE, body) for _ in range(8)])


@kind
def whole_nested_call() -> Kind:
    script = _nested(60_000)
    return Kind([_chat(tools=TOOLS, max_tokens=len(script))], script)


@kind
def whole_message_call() -> Kind:
    """A whole message whose call's arguments are an object of the answer."""
    script = _nested(60_000)
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    return Kind([_chat(MESSAGES, tools=tools, max_tokens=len(script))], script)


@kind
def streamed_nested_call() -> Kind:
    script = _nested(60_000)
    return Kind([_chat(tools=TOOLS, max_tokens=len(script), stream=True)], script)


@kind
def whole_xml_call() -> Kind:
    """A name without an end."""
    return Kind([_chat(tools=TOOLS, max_tokens=60_000)], "<tool_call>" + "y" * 60_000)


@kind
def many_calls() -> Kind:
    script = CALL * 1600
    return Kind([_chat(tools=TOOLS, max_tokens=len(script))], script)


@kind
def many_response_calls() -> Kind:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    script = CALL * 1600
    body = {"input": "?", "tools": tools, "max_output_tokens": len(script), "stream": True}
    return Kind([Call(RESPONSES, body)], script)


@kind
def stop_strings() -> Kind:
    """Each character may begin one."""
    stops = ["x" * (127 - one) + "y" + "x" * 128 for one in range(16)]
    return Kind([_completion(max_tokens=4096, stop=stops, stream=True) for _ in range(16)], WIDE)


@kind
def many_streams() -> Kind:
    return Kind([_completion(max_tokens=256, stream=True) for _ in range(500)])


@kind
def tokenize() -> Kind:
    text = "hello world " * 40_000
    return Kind(
        [Call("/tokenize", {"prompt": text}), Call("/tokenize", {"prompt": text[:65_000], "return_token_strs": True})]
    )


@kind
def detokenize() -> Kind:
    return Kind([Call("/detokenize", {"tokens": [256] * 65_536})])


@kind
def long_chat() -> Kind:
    """Just below what is read in a process of its own, and above."""
    turns = [{"role": "user", "content": "word " * 10} for _ in range(200)]
    return Kind([_chat(messages=turns[:size], max_tokens=1) for size in (180, 200, 10_000) for _ in range(8)])


@kind
def guides() -> Kind:
    names = {f"field{one}": {"type": "string", "maxLength": 500} for one in range(600)}
    schema = {"type": "object", "properties": names, "required": list(names)}
    choices = [f"choice {one} " + "x" * 40 for one in range(1024)]
    regex = "|".join("".join(f"[{chr(97 + (one + at) % 26)}-z]{{1,9}}" for at in range(40)) for one in range(90))
    given = ({"guided_json": schema}, {"guided_choice": choices}, {"guided_regex": regex})
    return Kind([_completion(**one, ignore_eos=False) for one in given for _ in range(4)])


@kind
def impatient() -> Kind:
    """Clients of many answers, who go away."""
    return Kind([Call(COMPLETIONS, {**_completion().body, "n": 128, "max_tokens": 20_000}, leaves=True)] * 4)


@kind
def refusals() -> Kind:
    """Refusals of large requests, each for another reason."""
    wrong = [{"prompt": ["x" * 300_000] * 3 + [7]}, {"prompt": [7] * 200_000}, {"prompt": [-1] * 100_000}]
    wrong += [{"stop": ["x" * 100_000] * 9}, {"y" * 1_000_000: 1}, {"temperature": "z" * 1_000_000}]
    return Kind([_completion(**one) for one in wrong])


@kind
def metrics() -> Kind:
    return Kind([Call("/metrics", None) for _ in range(32)])


def data_of(body: Any) -> bytes:
    return json.dumps(body).encode()
