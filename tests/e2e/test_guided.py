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

from tandem.cluster.cli.random_checkpoint import make_checkpoint
from tandem.cluster.errors import CallError, InvalidRequest
from tandem.cluster.protocol import build_request
from tandem.proto import inference_pb2_grpc
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling.guided import Constraint, Grammars, Guided
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.e2e.test_adaptive import ADAPTIVE, CHOICES, choosing, in_graphs
from tests.fuzz.guides import check
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.http_client import CHATS, answer, chunks
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
]


def follows(kind: dict[str, Any], text: str) -> bool:
    ((name, content),) = kind.items()
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
    return folder


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    with running_island(folder, {"model.max_model_len": 512, "gateway.http_port": 0}) as island:
        yield island


def sampling(number: int) -> dict[str, Any]:
    """Even ones are greedy."""
    return {"max_tokens": 120, "temperature": number % 2 * 1.0, "seed": number}


@torch.inference_mode()
def naive(model: "PreTrainedModel", folder: Path, prompt: list[int], kind: dict[str, Any], number: int) -> list[int]:
    """From whole forwards, with a mask for each token."""
    guided = build_request(prompt, {"guided": kind}, None).sampling.guided
    name = guided.WhichOneof("kind")
    texts = tuple(guided.choice.texts) if name == "choice" else (getattr(guided, name),)
    matcher: LLMatcher = Grammars(folder, VOCAB, (EOS,)).compile(Guided(name, texts))
    sampler, output = EagerSampler(torch.device("cpu")), list[int]()
    batch = SampleBatch.from_params([SamplingParams(**sampling(number))])
    while len(output) < 120 and EOS not in output:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        logits[torch.from_numpy(bits[: logits.shape[0]] == 0)] = -torch.inf
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
    """The others' tokens are what they would be alone."""
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
    ({"guided": {"nothing": "a"}}, "it must be one of json_schema, regex and grammar, as text, or choice"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused(island: Island, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(island.address, "The cache", **given)
    assert message in str(caught.value)


@pytest.mark.gate("True")
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_follow_the_schemas(island: Island, stream: bool) -> None:
    """Of functions whose schemas refer to parts of their own, by the same names."""
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
    for seed, choice in itertools.product(range(4), ("required", named)):
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
