"""Bodies of the HTTP server: what becomes of them, and how those that cannot be used are refused."""

import json
import pickle
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from pydantic import ValidationError

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.completions import CompletionBody
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.guided_fields import COMPACT
from tandem.cluster.frontends.openai.read_body import read_body
from tandem.cluster.frontends.openai.sampling_fields import SAMPLING
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.messages import prompt_from_bytes

TURN = {"role": "user", "content": "x"}
MANY = {f"k{index}": 1 for index in range(150)}


def read(kind: type[GenerationBody], body: Any) -> GenerationBody:
    return read_body(kind, json.dumps(body).encode())


def refusal(kind: type[GenerationBody], body: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(kind, body)
    assert caught.value.status == 400
    return caught.value


def value_of(field: Any) -> Any:
    """No other field's, and no default."""
    if field.is_repeated:
        return ["a", "b"] if field.type == FieldDescriptor.TYPE_STRING else [field.number, 5]
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not getattr(SamplingParams(), field.name)
    return field.number + 0.5 if field.type == FieldDescriptor.TYPE_FLOAT else field.number


def test_every_sampling_parameter_gets_through() -> None:
    sampling = {field.name: value_of(field) for field in SAMPLING} | {"seed": 1 << 63}
    request = read(CompletionBody, {"prompt": "text", **sampling}).requests()[0]
    assert request.text == "text"
    sent = {field.name: getattr(request.sampling, field.name) for field in SAMPLING}
    assert {
        name: list(value) if isinstance(sampling[name], list) else value for name, value in sent.items()
    } == sampling


def test_what_is_not_given_is_not_set() -> None:
    null: dict[str, Any] = dict.fromkeys(("model", "max_tokens", "temperature", "stop", "logprobs", "stream_options"))
    neutral: dict[str, Any] = {"n": None, "logit_bias": {}, "tools": [], "user": "u"}
    for body in ({}, null, neutral):
        request = read(CompletionBody, {"prompt": "text", **body}).requests()[0]
        assert not request.sampling.ListFields()
        assert not request.request_id


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_token_ids(prompt: Any) -> None:
    request = read(CompletionBody, {"prompt": prompt}).requests()[0]
    assert prompt_from_bytes(request.token_bytes).tolist() == [5, 6, 7]
    assert read(CompletionBody, {"prompt": ["text"]}).requests()[0].text == "text"


def test_chats() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None}
    request = read(ChatBody, {"messages": [TURN, parts], "max_tokens": 1, "max_completion_tokens": 2}).requests()[0]
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "x"), ("user", "a\nb")]
    assert request.sampling.max_tokens == 2
    assert not request.sampling.HasField("logprobs")
    for asked, expected in (({}, 0), ({"top_logprobs": 5}, 5)):
        request = read(ChatBody, {"messages": [TURN], "logprobs": True, **asked}).requests()[0]
        assert request.sampling.logprobs == expected


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("use_beam_search", True, "false"),
        ("length_penalty", 0.5, "1.0"),
        ("suffix", "x", '""'),
        ("truncation_side", "right", '"left"'),
        ("no_stop_trim", True, "false"),
        ("custom_logit_processor", "x", "null"),
        ("audio", {}, "null"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, value: Any, accepted: str) -> None:
    for kind, body in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [TURN]})):
        error = refusal(kind, {**body, name: value})
        assert error.param == name
        assert str(error).startswith(f"{name} is ")
        assert accepted in str(error)


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (CompletionBody, {}, "prompt", "prompt is missing; it must be text, a list of token ids"),
        (CompletionBody, {"prompt": None}, "prompt", "prompt is missing"),
        (CompletionBody, {"prompt": 5}, "prompt", "prompt is 5; it must be text"),
        (CompletionBody, {"prompt": []}, "prompt", "prompt is empty"),
        (
            CompletionBody,
            {"prompt": ["a", 5]},
            "prompt[1]",
            r"prompt\[1\] is 5; it must be text, a list of token ids, or",
        ),
        (CompletionBody, {"prompt": [[5], "b"]}, "prompt[1]", r"prompt\[1\] is 'b'"),
        (CompletionBody, {"prompt": [[5], [6, "b"]]}, "prompt[1][1]", r"prompt\[1\]\[1\] is 'b'"),
        (CompletionBody, {"prompt": ["a"] * 129}, "prompt", "or a list of 1 to 128 of either"),
        (
            CompletionBody,
            {"prompt": ["a"] * 43, "n": 3},
            "prompt",
            "prompt has 43 entries, with 3 answers each; at most",
        ),
        (
            CompletionBody,
            {"prompt": "a", "n": 2, "best_of": 3, "stream": True},
            "best_of",
            "is 3; with stream: true it must be n",
        ),
        (CompletionBody, {"prompt": [5, "a"]}, "prompt[1]", r"prompt\[1\] is 'a'; it must be text"),
        (CompletionBody, {"prompt": [True]}, "prompt[0]", r"prompt\[0\] is True"),
        (CompletionBody, {"prompt": "x", "max_tokens": "9"}, "max_tokens", "max_tokens is '9'; it must be an integer"),
        (CompletionBody, {"prompt": "x", "max_tokens": 9.5}, "max_tokens", "max_tokens is 9.5"),
        (CompletionBody, {"prompt": "x", "stop": [5]}, "stop", r"stop is \[5\]; it must be text, or a list of texts"),
        (CompletionBody, {"prompt": "x", "stream": "yes"}, "stream", "stream is 'yes'; it must be true or false"),
        (CompletionBody, {"prompt": "x", "messages": []}, "messages", r"messages is \[\]; here it must be null"),
        (CompletionBody, {"prompt": "x", "max_token": 5}, "max_token", "did you mean max_tokens"),
        (CompletionBody, {"prompt": "x", "temperatur": 5}, "temperatur", "did you mean temperature"),
        (ChatBody, {"messages": [TURN], "maxTokens": 5}, "maxTokens", "did you mean max_tokens"),
        (ChatBody, {"messages": [TURN], "max_new_tokens": 5}, "max_new_tokens", "did you mean max_tokens"),
        (CompletionBody, {"prompt": "x", "stop_sequences": ["a"]}, "stop_sequences", "did you mean stop"),
        (ChatBody, {"messages": [TURN], "request_id": "x" * 129}, "request_id", "a text of at most 128 characters"),
        (
            CompletionBody,
            {"prompt": "x", "logit_bias": {"a": 1}},
            "logit_bias",
            "has the key 'a'; each key must be a token id",
        ),
        (CompletionBody, {"prompt": "x", "logit_bias": {"5": "b"}}, "logit_bias[5]", "'b'; it must be an object of"),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias", "2000"),
        (CompletionBody, {"prompt": "x", "bad_words_ids": [5]}, "bad_words_ids[0]", "it must be a list of lists of"),
        (ChatBody, {"messages": [TURN], "response_format": {"type": "x"}}, "response_format.type", "or 'json_schema'"),
        (
            ChatBody,
            {"messages": [TURN], "response_format": {"type": "json_schema"}},
            "response_format",
            "response_format needs json_schema with type 'json_schema'",
        ),
        (
            ChatBody,
            {"messages": [TURN], "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "schema is missing",
        ),
        (
            ChatBody,
            {"messages": [TURN], "guided_json": {}, "guided_regex": "a"},
            "guided_regex",
            "guided_regex and guided_json are both set; set only one",
        ),
        (ChatBody, {"messages": [TURN], "structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not supported"),
        (
            ChatBody,
            {"messages": [{"role": "assistant", "function_call": {}, "audio": {"id": 1}}]},
            "messages[0].audio",
            "audio is not supported",
        ),
        (
            CompletionBody,
            {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "stream_options.include_usage is 1; it must be true or false",
        ),
        (ChatBody, {}, "messages", "messages is missing"),
        (ChatBody, {"messages": []}, "messages", r"messages is \[\]; it must be a list of 1 to 16384 messages"),
        (ChatBody, {"messages": [{"role": "user"}]}, "messages[0].content", r"messages\[0\].content is missing"),
        (ChatBody, {"messages": [TURN, {**TURN, "role": 5}]}, "messages[1].role", "role is 5; it must be text"),
        (
            ChatBody,
            {"messages": [{**TURN, "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
            "it must be a list of calls",
        ),
        (
            ChatBody,
            {"messages": [{**TURN, "function_call": {"a": 1}}]},
            "messages[0].function_call",
            "is not supported",
        ),
        (
            ChatBody,
            {"messages": [{**TURN, "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "type is 'image_url'; it must be 'text'",
        ),
        (ChatBody, {"messages": [TURN], "top_logprobs": 2}, "top_logprobs", "only with logprobs: true"),
        (ChatBody, {"messages": [TURN], "logprobs": 2}, "logprobs", "logprobs is 2; it must be true or false"),
        (CompletionBody, {"prompt": "x", "logprobs": True}, "logprobs", "logprobs is True; it must be an integer"),
        (CompletionBody, {"prompt": [[]]}, "prompt", "prompt is empty; at least one token id"),
        (
            ChatBody,
            {"messages": [{**TURN, **MANY}]},
            "messages[0]",
            r"messages\[0\] has 152 fields; it may have at most 100",
        ),
        (ChatBody, {"messages": [TURN] * 16385}, "messages", "it must be a list of 1 to 16384 messages"),
        (ChatBody, {"messages": [TURN], "prompt": "x"}, "prompt", "prompt is 'x'; here it must be null"),
    ],
)
def test_refusals_name_field_value_and_what_is_accepted(
    kind: type[GenerationBody], body: Any, param: str, message: str
) -> None:
    error = refusal(kind, body)
    assert error.param == param
    with pytest.raises(HttpError, match=message):
        raise error


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [{}] * 1000}),
        (ChatBody, {"messages": [{**TURN, "content": [{}] * 1000}]}),
        (CompletionBody, {"prompt": "x", "stop": [5] * 1000}),
        (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * 1000}),
        (CompletionBody, {"prompt": [5.5] * 1000}),
    ],
)
def test_a_bad_body_makes_few_findings(kind: type[GenerationBody], body: Any) -> None:
    """Each takes memory, and time in which nothing else runs."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 3


def test_a_body_of_many_fields() -> None:
    with pytest.raises(HttpError, match="the body has 151 fields; it may have at most 100"):
        read_body(CompletionBody, json.dumps({"prompt": "x", **MANY}).encode())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "a"} x'],
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(HttpError, match="the body cannot be read as JSON") as caught:
        read_body(CompletionBody, data)
    assert caught.value.status == 400


@pytest.mark.parametrize("data", [b"[]", b"5", b'"text"', b"null"])
def test_what_is_no_object(data: bytes) -> None:
    with pytest.raises(HttpError, match="it must be a JSON object"):
        read_body(ChatBody, data)


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (CompletionBody, {"prompt": "x", "max_tokens": -1}, "max_tokens", r"max_tokens is -1; .* \[0, 2\^32\)"),
        (CompletionBody, {"prompt": "x", "seed": -(2**70)}, "seed", "seed is -"),
        (CompletionBody, {"prompt": "x", "top_k": 1 << 40}, "top_k", "top_k is "),
        (CompletionBody, {"prompt": [-1]}, "prompt", "prompt is "),
        (ChatBody, {"messages": [TURN], "logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs is -1"),
        (ChatBody, {"messages": [TURN], "max_completion_tokens": -1}, "max_completion_tokens", "^max_completion_tok"),
    ],
)
def test_what_the_gateway_refuses_has_the_bodys_names(
    kind: type[GenerationBody], body: Any, param: str, message: str
) -> None:
    read_in = read(kind, body)
    with pytest.raises(InvalidRequest) as caught:
        read_in.requests()[0]
    error = read_in.blame(caught.value)
    assert (error.status, error.param) == (400, param)
    with pytest.raises(HttpError, match=message):
        raise error


def test_a_refusal_that_names_no_field_is_passed_on() -> None:
    body = read(ChatBody, {"messages": [TURN]})
    assert str(body.blame(InvalidRequest("the prompt has 9 tokens"))) == "the prompt has 9 tokens"
    error = body.blame(InvalidRequest("chat has 9 characters; it may have at most 5"))
    assert (str(error), error.param) == ("messages has 9 characters; it may have at most 5", "messages")


NEUTRAL = {"priority": None, "seed": -1, "length_penalty": 1, "early_stopping": False, "use_beam_search": False}
NEUTRAL |= {"min_tokens": None, "spaces_between_special_tokens": True, "store": True, "verbosity": "low"}
NEUTRAL |= {"reasoning_effort": "high", "service_tier": None, "metadata": {"a": "b"}, "parallel_tool_calls": True}
NEUTRAL |= {"cache_salt": "", "separate_reasoning": True, "logprobs": False, "stop_sequences": None, "colour": None}
NEUTRAL |= {"response_format": {"type": "text"}, "stream": True, "stream_options": {"include_obfuscation": False}}


def test_values_that_ask_for_nothing_are_taken() -> None:
    for kind, body in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [TURN]})):
        taken = read(kind, {**body, **NEUTRAL, "request_id": "mine"})
        (request,) = taken.requests()
        assert not request.sampling.ListFields()
        assert request.request_id == "mine"
        assert not taken.headers


@pytest.mark.parametrize("stream", [None, False])
def test_a_whole_answer_has_usage_whatever_the_options_of_streams_say(stream: bool | None) -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    for kind, body in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [TURN]})):
        taken = read(kind, {**body, "stream": stream, "stream_options": options})
        assert not taken.requests()[0].sampling.ListFields()


def test_several_prompts_are_requests_with_ids_of_their_own() -> None:
    requests = read(CompletionBody, {"prompt": ["a", "b"], "request_id": "mine"}).requests()
    assert [request.request_id for request in requests] == ["", ""]


def test_messages_have_fields_that_change_nothing() -> None:
    silent = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "tool_calls": []}
    named = {**TURN, "name": "Ann", "function_call": None, "colour": "red"}
    (request,) = read(ChatBody, {"messages": [named, silent, {"role": "developer", "content": "y"}]}).requests()
    turns = [(turn.role, turn.content) for turn in request.chat.messages]
    assert turns == [("user", "x"), ("assistant", ""), ("developer", "y")]


def test_options_of_templates() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    chat = read(ChatBody, {"messages": [TURN], **options, "continue_final_message": True}).requests()[0].chat
    assert json.loads(chat.template_kwargs) == {"enable_thinking": False}
    assert (chat.add_generation_prompt, chat.continue_final_message) == (False, True)
    plain = read(ChatBody, {"messages": [TURN], "chat_template_kwargs": {}}).requests()[0].chat
    assert [field.name for field, _ in plain.ListFields()] == ["messages"]
    error = read(ChatBody, {"messages": [TURN]}).blame(InvalidRequest("chat.template_kwargs has tools, which is"))
    assert (error.param, str(error)) == ("chat_template_kwargs", "chat_template_kwargs has tools, which is")


def test_unknown_fields_are_ignored_and_listed() -> None:
    body = read(ChatBody, {"messages": [TURN], "colour": 1, "a\r\nset-cookie: x": 2, "é" * 200: 3})
    header = body.headers["x-tandem-ignored"]
    assert header == f"colour, a??set-cookie??x, {'?' * 80}"
    assert pickle.loads(pickle.dumps(body.without_prompt())).headers == body.headers
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = read(ChatBody, {"messages": [TURN], **options})
    assert (body.includes_usage, body.tells_usage, body.headers) == (True, True, {})
    many = read(CompletionBody, {"prompt": "x", **{f"zz{index}": 1 for index in range(90)}})
    assert many.headers["x-tandem-ignored"].endswith("zz15, and 74 more")


def test_bias_and_words_by_token_ids() -> None:
    fields = {"logit_bias": {"5": 1, "7": -2.5}, "bad_words_ids": [[1, 2], [3]]}
    sampling = read(CompletionBody, {"prompt": "x", **fields}).requests()[0].sampling
    assert dict(sampling.logit_bias) == {5: 1, 7: -2.5}
    assert [list(word.ids) for word in sampling.bad_words_ids] == [[1, 2], [3]]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "default": None}}}
A_SPACE = {"whitespace_pattern": " ?"}


def spaced(**options: Any) -> dict[str, Any]:
    return SCHEMA | {"x-guidance": options}


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": SCHEMA},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "json_schema", spaced(**COMPACT)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, "json_schema", spaced(**A_SPACE)),
        (
            {"structured_outputs": {"json": json.dumps(spaced(lenient=True)), "whitespace_pattern": " ?"}},
            "json_schema",
            spaced(lenient=True, **A_SPACE),
        ),
        ({"structured_outputs": {"json": "true", "whitespace_pattern": " ?"}}, "json_schema", {"x-guidance": A_SPACE}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            "json_schema",
            {"type": "object", "x-guidance": dict(COMPACT)},
        ),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, "regex", "a+"),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_any_whitespace": False,
                    "whitespace_pattern": None,
                    "disable_additional_properties": False,
                    "structural_tag": None,
                }
            },
            "json_schema",
            SCHEMA,
        ),
        (
            {"structured_outputs": {"json": {"allOf": [SCHEMA]}, "disable_additional_properties": True}},
            "json_schema",
            {"allOf": [SCHEMA | {"additionalProperties": False}], "x-guidance": {}},
        ),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, "json_schema", spaced(**A_SPACE)),
        (
            {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": " ?"},
            "json_schema",
            {"type": "object", "x-guidance": A_SPACE},
        ),
    ],
)
def test_guided_output_by_each_name(fields: Any, kind: str, expected: Any) -> None:
    guided = read(ChatBody, {"messages": [TURN], **fields}).requests()[0].sampling.guided
    assert guided.WhichOneof("kind") == kind
    held = getattr(guided, kind)
    given = list(held.texts) if kind == "choice" else json.loads(held) if kind == "json_schema" else held
    assert given == expected


def test_a_refused_guide_has_the_bodys_name() -> None:
    body = read(ChatBody, {"messages": [TURN], "guided_regex": "("})
    error = body.blame(InvalidRequest("sampling.guided: the regex does not compile"))
    assert (str(error), error.param) == ("guided_regex: the regex does not compile", "guided_regex")


@pytest.mark.parametrize(
    "message",
    [
        "the prompt has 9 tokens; the model's context takes at most 7 and one output",
        "sampling.max_tokens is 5 after a prompt of 4 tokens; the model's context of 8 leaves at most 4",
        "text has 99 characters; it may have at most 80, which 8 of the model's longest tokens would make",
    ],
)
def test_clients_can_tell_that_the_context_is_too_short(message: str) -> None:
    error = read(CompletionBody, {"prompt": "x"}).blame(InvalidRequest(message))
    assert error.body["error"]["code"] == "context_length_exceeded"
    assert str(error).startswith("This model's maximum context length is 8 tokens. However, ")
