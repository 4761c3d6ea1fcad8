"""Outputs that follow grammars, through the gateway: valid, and the tokens of masks on transformers' logits."""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tandem.cluster.errors import CallError, InvalidRequest
from tandem.cluster.protocol import build_request
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import CHAT_TEMPLATE, make_checkpoint
from tandem.proto import inference_pb2_grpc
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.guided import Constraint, Grammars
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tandem.workers.wire.messages import sampling_from_proto
from tests.cluster.scripted_model import named_events
from tests.e2e.test_adaptive import ADAPTIVE, CHOICES, choosing, in_graphs
from tests.fuzz.guides import check
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.http_client import CHATS, COMPLETIONS, answer, chunks, post
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["in_graphs"]

EOS, VOCAB = 1, 512
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["s", "m", "l"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"[A-F]{2}-([0-9]{1,3}|zebra){2}"
CHOICE = ["yes", "no", "perhaps: é"]
LARK = 'start: "(" term ("+" term){0,3} ")"\nterm: /[0-9]{1,2}/'
GBNF = 'root ::= "<" [a-c] [a-c] ">"'
KINDS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": REGEX},
    {"choice": CHOICE},
    {"grammar": LARK},
    {"grammar": GBNF},
    {"regex": REGEX, "thinking": {"begin": "<t>", "end": "</t>", "opened": True}},
]
THINKING_TOKENS = 30  # of the 120 that sampling() gives


def follows(kind: dict[str, Any], text: str) -> bool:
    (name, content), *_ = kind.items()
    if "thinking" in kind:
        text = text.partition("</t>")[2].lstrip()
    if name == "json_schema":
        jsonschema.validate(json.loads(text), content)
        return True
    if name == "choice":
        return text in content
    patterns = {REGEX: REGEX, LARK: r"\(\d{1,2}(\+\d{1,2}){0,3}\)", GBNF: "<[a-c]{2}>"}
    return re.fullmatch(patterns[content], text) is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guided") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    thinks = "{% if think %}<think>\n{% elif think is false %}<think>\n\n</think>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + thinks)
    return folder


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, {"model.max_model_len": 512, "gateway.http_port": 0}) as island:
        yield island


def sampling(number: int) -> dict[str, Any]:
    """Returns sampling parameters. Even numbers are greedy."""
    return {"max_tokens": 120, "temperature": number % 2 * 1.0, "seed": number}


@torch.inference_mode()
def naive(model: "PreTrainedModel", folder: Path, prompt: list[int], kind: dict[str, Any], number: int) -> list[int]:
    """Generates from whole forwards, with a mask for each token."""
    guided = sampling_from_proto(build_request(prompt, {"guided": kind}, None).sampling).guided
    assert guided is not None
    matcher: LLMatcher = Grammars(folder, VOCAB, (EOS,)).compile(guided)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    end = tokenizer.encode("</t>", add_special_tokens=False)
    sampler, output = EagerSampler(torch.device("cpu")), list[int]()
    batch = SampleBatch.from_params([SamplingParams(**sampling(number))])
    while len(output) < 120 and EOS not in output:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        logits[torch.from_numpy(bits[: logits.shape[0]] == 0)] = -torch.inf
        if "thinking" in kind and len(output) >= THINKING_TOKENS and "</t>" not in tokenizer.decode(output):
            late = output[THINKING_TOKENS:]
            written = next((n for n in (3, 2, 1) if n < len(end) and late[-n:] == end[:n]), 0)
            if logits[end[written]] > -torch.inf:  # not within a character
                logits[torch.arange(len(logits)) != end[written]] = -torch.inf
        token = int(sampler.sample(logits[None], batch, np.array([len(prompt) + len(output)])).wait().token_ids[0])
        assert matcher.consume_token(token)
        output.append(token)
    return output


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = load_oracle(folder)
    return [
        naive(model, folder, random_prompt(10 + 9 * number, number, VOCAB), KINDS[number // 2], number)
        for number in range(2 * len(KINDS))
    ]


def ask(island: Island, number: int) -> list[int]:
    prompt, kind = random_prompt(10 + 9 * number, number, VOCAB), KINDS[number // 2]
    updates = complete(island.address, prompt, guided=kind, **sampling(number))
    if updates[-1].finish_reason == "stop":
        assert follows(kind, text_of(updates)), text_of(updates)
    return tokens_of(updates)


def test_outputs_are_those_of_masked_logits(island: Island, expected: list[list[int]]) -> None:
    assert [ask(island, number) for number in range(len(expected))] == expected
    assert sum(tokens[-1] == EOS for tokens in expected) >= len(expected) - 2, "most have come to their end"


@pytest.mark.usefixtures("in_graphs")
def test_guided_rows_beside_others_in_steps_that_overlap(folder: Path, expected: list[list[int]]) -> None:
    """The other rows' tokens equal their tokens alone."""
    prompts = [random_prompt(20 + 3 * number, 50 + number, VOCAB) for number in range(4)]
    model = load_oracle(folder)
    plain = [greedy(model, prompt, 40) for prompt in prompts]
    settings = ADAPTIVE | {"model.max_model_len": 512, "scheduler.max_sequences": 16}
    with running_island(folder, settings) as island, ThreadPoolExecutor(16) as pool:
        for name in ("local", "crossed"):
            with choosing(island, CHOICES[name]):
                guided = [pool.submit(ask, island, number) for number in range(len(expected))]
                free = [
                    pool.submit(complete, island.address, prompt, max_tokens=40, temperature=0, ignore_eos=True)
                    for prompt in prompts
                ]
                assert [one.result(100) for one in guided] == expected
                assert [tokens_of(one.result(100)) for one in free] == plain


def test_a_resumed_request_goes_on_in_its_grammar(island: Island, expected: list[list[int]]) -> None:
    with grpc.insecure_channel(island.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number, tokens in enumerate(expected):
            prompt = random_prompt(10 + 9 * number, number, VOCAB)
            for received in {1, len(tokens) // 2, len(tokens) - 1}:
                request = build_request(
                    prompt, {"guided": KINDS[number // 2], **sampling(number)}, f"{number} {received}"
                )
                request.resume.token_ids.extend(tokens[:received])
                rest = [token for message in stub.Generate(request, timeout=60) for token in message.token_ids]
                assert rest == tokens[received:]


@pytest.mark.parametrize("seed", range(9))
def test_random_guides_in_streams_and_resumed(island: Island, seed: int) -> None:
    check(island, seed)


def test_a_request_whose_masks_fail_ends_and_no_other(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    following = Constraint._next_mask

    def fails(self: Constraint, tokens: list[int]) -> Any:
        if self.consumed > 2:
            raise RuntimeError("too complex")
        return following(self, tokens)

    monkeypatch.setattr(Constraint, "_next_mask", fails)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(complete, island.address, [5, 6, 7], max_tokens=60, temperature=0, ignore_eos=True)
        with pytest.raises(CallError, match="too complex"):
            complete(island.address, [5, 6, 8], max_tokens=60, temperature=0, guided={"regex": "[a-z]{30}"})
        assert len(tokens_of(other.result(60))) == 60


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided": {"json_schema": '{"type": "nonsense"}'}}, "sampling.guided: json_schema cannot be compiled"),
    ({"guided": {"json_schema": "{"}}, "sampling.guided: json_schema cannot be"),
    ({"guided": {"regex": "[a"}}, "sampling.guided: regex cannot be compiled"),
    ({"guided": {"grammar": "start: nobody"}}, "sampling.guided: grammar cannot be compiled"),
    ({"guided": {"choice": []}}, "sampling.guided.choice has 0 texts; it must be 1 to 1024"),
    ({"guided": {"regex": "a" * 70_000}}, "sampling.guided.regex has 70000 characters; it must be at most 65536"),
    ({"guided": {"regex": "a"}, "min_tokens": 3}, "sampling.min_tokens is 3; it must be absent beside guided"),
    ({"guided": {"regex": "a"}, "ignore_eos": True}, "sampling.ignore_eos is True; it must be absent beside guided"),
    (
        {"guided": {"regex": "a", "thinking": {"begin": "", "end": "b"}}},
        "thinking.begin has 0 characters; it must be 1",
    ),
    ({"guided": {"grammar": "{}", "thinking": {"begin": "a", "end": "b"}}}, "sampling.guided: grammar cannot be"),
    ({"guided": {"grammar": "{", "thinking": {"begin": "a", "end": "b"}}}, "sampling.guided: grammar cannot be"),
    ({"guided": {"nothing": "a"}}, "it must be one of json_schema, regex and grammar, as text, or choice"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused(island: Island, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(island.address, "The cache", **given)
    assert message in str(caught.value)


ITSELF = {"$ref": "#"}
LARGE = "(?:(?:(?:a{50}){50}){50}){50}"
CHAIN = "start: r0\n" + "".join(f"r{number}: r{number + 1}\n" for number in range(4000)) + 'r4000: "a"'
NO_TEXT = "no text follows it, such as where it refers to itself and never ends"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": ITSELF}}
DOORS: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": "?", "structured_outputs": {"json": ITSELF}}, "structured_outputs", NO_TEXT),
    (
        COMPLETIONS,
        {"prompt": "?", "guided_grammar": CHAIN},
        "guided_grammar",
        "nested too deeply",
    ),
    (
        CHATS,
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ITSELF}}},
        "response_format",
        NO_TEXT,
    ),
    (CHATS, {**ASKED, "tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "f"}}}, "tool_choice", NO_TEXT),
    (CHATS, {**ASKED, "tools": [TOOL], "tool_choice": "required"}, "tool_choice", NO_TEXT),
    (
        "/v1/responses",
        {"input": "?", "text": {"format": {"type": "json_schema", "name": "n", "schema": ITSELF}}},
        "text",
        NO_TEXT,
    ),
    (
        "/v1/messages",
        {**ASKED, "tools": [{"name": "f", "input_schema": ITSELF}], "tool_choice": {"type": "any"}},
        "tool_choice",
        NO_TEXT,
    ),
    (
        "/v1/messages",
        {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": ITSELF}}},
        "output_config",
        NO_TEXT,
    ),
]


@pytest.mark.parametrize("stream", [False, True])
def test_no_door_lets_a_grammar_to_a_worker_that_none_could_follow(island: Island, stream: bool) -> None:
    for path, body, param, why in DOORS:
        response = post(island.http, path, {**body, "stream": stream})
        assert response.status_code == 400, (path, response.text)
        error = response.json()["error"]
        assert f"{param}: " in error["message"]
        assert why in error["message"]
        assert error.get("param", param) == param
    for guided in ({"json_schema": ITSELF}, {"grammar": "start: start"}, {"grammar": CHAIN}, {"regex": LARGE}):
        with pytest.raises(InvalidRequest, match=r"^sampling\.guided: \w+ cannot be (compiled|followed): "):
            complete(island.address, "The cache", guided=guided)


@pytest.mark.gate("True")
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_follow_the_schemas(island: Island, stream: bool) -> None:
    """The schemas of the functions refer to parts of their own, by the same names."""
    sizes = {"small": {"const": "s"}, "large": {"const": "l"}}
    schemas: dict[str, Any] = {
        name: {
            "type": "object",
            "properties": {"size": {"$ref": "#/$defs/size"}, "count": {"enum": [1, 2]}},
            "required": ["size", "count"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
            "$defs": {"size": size},
        }
        for name, size in sizes.items()
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in schemas.items()]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "max_tokens": 400}
    named = {"type": "function", "function": {"name": "large"}}
    seen = set[str]()
    for seed, choice in itertools.product(range(7), ("required", named)):
        asked = {**body, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        if stream:
            deltas = [event["choices"][0]["delta"] for event in chunks(island.http, CHATS, **asked)]
            parts = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
            name, arguments = parts[0]["name"], "".join(part["arguments"] for part in parts)
        else:
            (call,) = answer(island.http, CHATS, **asked)["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
        jsonschema.validate(json.loads(arguments), schemas[name])
        assert choice == "required" or name == "large"
        seen.add(name)
    assert seen == {"small", "large"}


ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["answer"],
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}


def says(island: Island, stream: bool, **body: Any) -> list[tuple[str, str, str]]:
    """Returns reasoning, content and arguments of calls, of each choice."""
    asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 120, **body}
    if not stream:
        messages = [choice["message"] for choice in answer(island.http, CHATS, **asked)["choices"]]
        calls = ["".join(c["function"]["arguments"] for c in one.get("tool_calls", ())) for one in messages]
        texts = [(one.get("reasoning_content") or "", one.get("content") or "") for one in messages]
        return [(*two, arguments) for two, arguments in zip(texts, calls, strict=True)]
    said = [["", "", ""] for _ in range(body.get("n", 1))]
    for event in chunks(island.http, CHATS, **asked):
        for choice in event["choices"]:
            delta, one = choice["delta"], said[choice["index"]]
            one[0] += delta.get("reasoning_content") or ""
            one[1] += delta.get("content") or ""
            one[2] += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
    return [(one, two, three) for one, two, three in said]


@pytest.mark.gate("True")
@pytest.mark.parametrize("stream", [False, True])
def test_what_follows_a_guide_is_content_behind_the_thinking(island: Island, stream: bool) -> None:
    """The model never ends its thinking by itself: three quarters of max_tokens are left to the answer."""
    for kwargs, guide in (
        ({"think": True}, {"response_format": FORMAT}),
        ({"think": True}, {"structured_outputs": {"choice": CHOICE}}),
        ({"think": True}, {"guided_regex": REGEX}),
        ({"think": False}, {"response_format": FORMAT}),
        ({}, {"response_format": FORMAT}),
    ):
        said = says(island, stream, chat_template_kwargs=kwargs, n=2, seed=5, **guide)
        for reasoning, content, _ in said:
            kind, text = next(iter(guide.items()))
            if kind == "response_format":
                jsonschema.validate(json.loads(content), ANSWER)
            else:
                assert content in CHOICE if kind == "structured_outputs" else re.fullmatch(REGEX, content), text
            assert bool(reasoning) == bool(kwargs.get("think"))
        assert said[0] != said[1] or not kwargs.get("think")


def test_with_few_tokens_an_answer_begins_at_once(island: Island) -> None:
    asked = {"chat_template_kwargs": {"think": True}, "max_tokens": 40, "response_format": FORMAT}
    ((reasoning, content, _),) = says(island, False, **asked)
    assert reasoning == ""
    jsonschema.validate(json.loads(content), ANSWER)


def test_an_answer_that_goes_on_with_open_thinking_thinks(island: Island) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>I look"}]
    asked = {"messages": turns, "continue_final_message": True, "response_format": FORMAT}
    ((reasoning, content, _),) = says(island, False, **asked)
    assert reasoning
    jsonschema.validate(json.loads(content), ANSWER)


@pytest.mark.gate("required")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_calls_come_behind_the_thinking(island: Island, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": ANSWER}}]
    asked = {"chat_template_kwargs": {"think": True}, "tools": tools, "tool_choice": choice, "max_tokens": 200}
    for stream in (False, True):
        ((reasoning, content, arguments),) = says(island, stream, **asked, parallel_tool_calls=False)
        assert reasoning
        assert not content
        jsonschema.validate(json.loads(arguments), ANSWER)


@pytest.mark.gate("True")
@pytest.mark.parametrize("stream", [False, True])
def test_other_apis_think_before_what_follows_a_schema(island: Island, stream: bool) -> None:
    thinks = {"chat_template_kwargs": {"think": True}, "stream": stream}
    form = {"type": "json_schema", "name": "a", "schema": ANSWER}
    body = {"input": "?", "max_output_tokens": 120, "text": {"format": form}}
    sent = post(island.http, "/v1/responses", body | thinks)
    response = named_events(sent)[-1]["response"] if stream else sent.json()
    reasoning, message = response["output"]
    assert reasoning["content"][0]["text"]
    jsonschema.validate(json.loads(message["content"][0]["text"]), ANSWER)
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 120}
    body["output_format"] = {"type": "json_schema", "schema": ANSWER}
    sent = post(island.http, "/v1/messages", body | thinks)
    if stream:
        deltas = [event["delta"] for event in named_events(sent) if event["type"] == "content_block_delta"]
        texts = ["".join(delta.get(name, "") for delta in deltas) for name in ("thinking", "text")]
    else:
        texts = [block[block["type"]] for block in sent.json()["content"]]
    assert texts[0]
    jsonschema.validate(json.loads(texts[1]), ANSWER)


FIXED = {"type": "object", "properties": {"a": {"enum": [[1, 2]]}, "b": {"enum": ["x"]}}, "required": ["a", "b"]}


def written(island: Island, path: str, stream: bool, bias: dict[str, int], **fields: Any) -> tuple[str, str]:
    """Returns the text of an answer, or the arguments of its call, and why it ended."""
    prompt = {"prompt": "?"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "?"}]}
    asked = {**prompt, "logit_bias": bias, "max_tokens": 100, "temperature": 0, **fields}
    said = chunks(island.http, path, **asked) if stream else [answer(island.http, path, **asked)]
    choices = [one["choices"][0] for one in said]
    messages = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
    text = "".join(message.get("content") or "" for message in messages)
    return "".join(calls) or text, choices[-1]["finish_reason"]


@pytest.mark.gate("True")
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_likes_spaces_has_no_more_of_them_than_asked_for(
    island: Island, folder: Path, stream: bool
) -> None:
    """Forced calls have the spaces of templates; other JSON has the spaces that vLLM's fields allow."""
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    bias = {str(token): 100 for text in (" ", "\n") for token in tokenizer.encode(text, add_special_tokens=False)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": FIXED}}]
    named = {"type": "function", "function": {"name": "f"}}
    compact = '{"a": [1, 2], "b": "x"}'
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        assert written(island, CHATS, stream, bias, **body) == (compact, reason)
    for path in (COMPLETIONS, CHATS):
        none = {"json": FIXED, "disable_any_whitespace": True}
        assert written(island, path, stream, bias, structured_outputs=none) == (compact, "stop")
        text, reason = written(
            island, path, stream, bias, structured_outputs={"json": FIXED, "whitespace_pattern": " ?"}
        )
        assert (text.replace(" ", ""), reason) == (compact.replace(" ", ""), "stop")
        assert "  " not in text
        text, reason = written(island, path, stream, bias, structured_outputs={"json": FIXED})
        assert ("x" in text, reason) == (False, "length")
