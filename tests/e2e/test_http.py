"""OpenAI's API through the HTTP server of an island: answers equal the gRPC server's."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from tandem import __version__
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.worker import Worker
from tests.cluster.scripted_model import named_events
from tests.support.client_requests import complete, text_of, tokens_of
from tests.support.http_client import CHATS, COMPLETIONS, GREEDY, answer, chunks, get, post, refused
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

RESPONSES = "/v1/responses"
PROMPT = "The cache keeps keys and values in pages."
CHAT = [{"role": "user", "content": "Where is the page?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("http") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def island(folder: Path) -> Iterator[Island]:
    overrides = {"model.max_model_len": 512, "cache.num_pages": 96, "gateway.http_port": 0}
    with running_island(folder, overrides) as island:
        yield island


def only_choice(body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = body["choices"]
    assert choice["index"] == 0
    return choice


def test_health_and_models(island: Island, folder: Path) -> None:
    assert get(island.http, "/health").json() == {"status": "ok"}
    listed = get(island.http, "/v1/models").json()
    (model,) = listed["data"]
    assert (listed["object"], model["id"], model["object"]) == ("list", "model", "model")
    assert (model["max_model_len"], model["root"], model["parent"]) == (512, str(folder), None)
    assert abs(model["created"] - time.time()) < 3600
    assert get(island.http, "/v1/models/model").json() == model
    other = refused(get(island.http, "/v1/models/other"), 404)
    assert (other["message"], other["code"]) == ("model is 'other'; 'model' is served here", "model_not_found")


@pytest.mark.parametrize("length", [1, 9, 150])
def test_tokens_are_the_oracles(island: Island, folder: Path, length: int) -> None:
    prompt = random_prompt(length, length)
    expected = greedy(load_oracle(folder), prompt, 12)
    whole = answer(island.http, COMPLETIONS, prompt=prompt, max_tokens=12, return_token_ids=True, **GREEDY)
    assert only_choice(whole)["token_ids"] == expected
    parts = chunks(island.http, COMPLETIONS, prompt=prompt, max_tokens=12, return_token_ids=True, **GREEDY)
    assert [token for part in parts for token in only_choice(part)["token_ids"]] == expected


def test_a_completion(island: Island) -> None:
    updates = complete(island.address, PROMPT, max_tokens=20, **GREEDY)
    whole = answer(island.http, COMPLETIONS, model="model", prompt=PROMPT, max_tokens=20, user="somebody", **GREEDY)
    assert whole["id"].startswith("cmpl-")
    assert (whole["object"], whole["model"]) == ("text_completion", "model")
    assert abs(whole["created"] - time.time()) < 3600
    said = {"index": 0, "text": text_of(updates), "logprobs": None}
    assert only_choice(whole) == said | {"finish_reason": "length", "stop_reason": None}
    usage, counted = whole["usage"], updates[-1].usage
    assert counted is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (counted.prompt_tokens, 20)
    assert usage["total_tokens"] == counted.prompt_tokens + 20
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0  # of the request before


def test_a_chat(island: Island, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT)
    expected = text_of(complete(island.address, ids, max_tokens=8, **GREEDY))
    whole = answer(island.http, CHATS, model="model", messages=CHAT, max_completion_tokens=8, n=1, **GREEDY)
    assert whole["id"].startswith("chatcmpl-")
    assert whole["object"] == "chat.completion"
    choice = only_choice(whole)
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert whole["usage"]["prompt_tokens"] == len(ids)
    in_parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = answer(island.http, CHATS, messages=in_parts, max_tokens=8, **GREEDY)
    assert only_choice(again) == choice


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "cmpl"), (CHATS, "chatcmpl")])
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream(island: Island, path: str, name: str, usage: bool) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    asked |= GREEDY | {"max_tokens": 20}
    whole = answer(island.http, path, **asked)
    parts = chunks(island.http, path, **asked, **({"stream_options": {"include_usage": True}} if usage else {}))
    if usage:
        last = parts.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 20
        assert all(part["usage"] is None for part in parts)
    else:
        assert not any("usage" in part for part in parts)
    assert len(parts) > 1
    (of_all,) = {(part["id"], part["object"], part["created"], part["model"]) for part in parts}
    assert of_all[0].startswith(f"{name}-")
    assert of_all[1] == ("text_completion" if path == COMPLETIONS else "chat.completion.chunk")
    choices = [only_choice(part) for part in parts]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(parts) - 1) + ["length"]
    if path == COMPLETIONS:
        assert "".join(choice["text"] for choice in choices) == only_choice(whole)["text"]
    else:
        deltas = [choice["delta"] for choice in choices]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(delta["content"] for delta in deltas) == only_choice(whole)["message"]["content"]


def test_stop_strings_end_a_text(island: Island) -> None:
    whole = only_choice(answer(island.http, COMPLETIONS, prompt=PROMPT, max_tokens=40, **GREEDY))["text"]
    stop = whole[11:14]
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "stop": stop, **GREEDY}
    stopped = only_choice(answer(island.http, COMPLETIONS, **asked))
    assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    parts = [only_choice(part) for part in chunks(island.http, COMPLETIONS, **asked)]
    assert "".join(part["text"] for part in parts) == stopped["text"]
    assert parts[-1]["finish_reason"] == "stop"
    including = only_choice(answer(island.http, COMPLETIONS, **asked, include_stop_str_in_output=True))
    assert including["text"] == stopped["text"] + stop


def test_logprobs_of_completions(island: Island, tokenizer: Tokenizer) -> None:
    updates = complete(island.address, PROMPT, max_tokens=10, logprobs=2, **GREEDY)
    expected = [token for update in updates for token in update.logprobs]
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10, "logprobs": 2, **GREEDY}
    choice = only_choice(answer(island.http, COMPLETIONS, **asked))
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert found["text_offset"] == [sum(map(len, found["tokens"][:count])) for count in range(10)]
    for name, top, token in zip(found["tokens"], found["top_logprobs"], expected, strict=True):
        assert name in top
        assert sorted(top.values())[-2:] == pytest.approx(sorted(value for _, value in token.top), abs=1e-4)
    by_ids = only_choice(answer(island.http, COMPLETIONS, **asked, return_tokens_as_token_ids=True))["logprobs"]
    assert by_ids["tokens"] == [f"token_id:{token.token_id}" for token in expected]
    parts = [only_choice(part)["logprobs"] for part in chunks(island.http, COMPLETIONS, **asked)]
    assert [offset for part in parts for offset in part["text_offset"]] == found["text_offset"]
    assert [name for part in parts for name in part["tokens"]] == found["tokens"]


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["s", "m"]}, "counts": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "required": ["size", "counts"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_a_response_format(island: Island) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    asked: dict[str, Any] = {"messages": CHAT, "max_tokens": 100, "response_format": form, "seed": 5}
    choice = only_choice(answer(island.http, CHATS, **asked))
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["finish_reason"] == "stop"
    said = [only_choice(part)["delta"].get("content", "") for part in chunks(island.http, CHATS, **asked)]
    assert "".join(said) == choice["message"]["content"]
    text = only_choice(answer(island.http, COMPLETIONS, prompt="x", guided_regex="[ab]{3}c", seed=5))["text"]
    assert re.fullmatch("[ab]{3}c", text)


def test_a_regex_that_does_not_compile_is_refused_by_its_name(island: Island) -> None:
    error = refused(post(island.http, CHATS, {"messages": CHAT, "structured_outputs": {"regex": "("}}), 400)
    assert error["param"] == "structured_outputs"
    assert error["message"].startswith("structured_outputs: ")


def test_a_bias_decides(island: Island) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}
    choice = only_choice(answer(island.http, COMPLETIONS, **asked, logit_bias={"77": 100}, **GREEDY))
    assert choice["token_ids"] == [77] * 3


def test_the_last_message_goes_on(island: Island, tokenizer: Tokenizer) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "It is"}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    ids = tokenizer.encode_chat(turns, **options)
    expected = text_of(complete(island.address, ids, max_tokens=8, **GREEDY))
    whole = answer(island.http, CHATS, messages=turns, max_tokens=8, **options, **GREEDY)
    assert only_choice(whole)["message"]["content"] == expected
    assert whole["usage"]["prompt_tokens"] == len(ids) < len(tokenizer.encode_chat(turns))
    options = {"continue_final_message": True, "add_generation_prompt": True}
    error = refused(post(island.http, CHATS, {"messages": turns, **options}), 400)
    assert error["param"] == "add_generation_prompt"


def test_logprobs_of_chats(island: Island, tokenizer: Tokenizer) -> None:
    updates = complete(island.address, tokenizer.encode_chat(CHAT), max_tokens=6, logprobs=3, **GREEDY)
    expected = [token for update in updates for token in update.logprobs]
    asked: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "logprobs": True, **GREEDY}
    choice = only_choice(answer(island.http, CHATS, **asked, top_logprobs=3))
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry, token in zip(content, expected, strict=True):
        assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(
            [value for _, value in token.top], abs=1e-4
        )
        assert {"token", "logprob", "bytes"} == set(entry["top_logprobs"][0])
    without = only_choice(answer(island.http, CHATS, **asked))["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[]] * 6


def test_logprobs_of_responses(island: Island) -> None:
    """They equal those of a chat, in the whole answer and piece by piece in its events."""
    common: dict[str, Any] = {"top_logprobs": 3, **GREEDY}
    chat = answer(island.http, CHATS, messages=CHAT, max_tokens=6, logprobs=True, **common)
    expected = only_choice(chat)["logprobs"]["content"]
    asked: dict[str, Any] = {"input": CHAT, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
    whole = answer(island.http, RESPONSES, **asked, **common)
    assert whole["output"][0]["content"][0]["logprobs"] == expected
    assert whole["top_logprobs"] == 3
    events = named_events(post(island.http, RESPONSES, {**asked, **common, "stream": True}))
    pieces = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(pieces) > 1
    assert [entry for piece in pieces for entry in piece] == expected
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == expected
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected


def test_draws_are_those_of_the_other_frontend(island: Island) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 11, "max_tokens": 16}
    expected = complete(island.address, PROMPT, ignore_eos=True, **drawn)
    choice = only_choice(
        answer(island.http, COMPLETIONS, prompt=PROMPT, ignore_eos=True, return_token_ids=True, **drawn)
    )
    assert choice["token_ids"] == tokens_of(expected)
    stop = tokens_of(expected)[4]
    ended = answer(island.http, COMPLETIONS, prompt=PROMPT, stop_token_ids=[stop], return_token_ids=True, **drawn)
    assert only_choice(ended)["token_ids"] == tokens_of(expected)[: tokens_of(expected).index(stop) + 1]


def test_a_chat_may_be_as_long_as_there_is_room(island: Island, tokenizer: Tokenizer) -> None:
    whole = answer(island.http, CHATS, messages=CHAT, **GREEDY)
    assert whole["usage"]["total_tokens"] == 512
    assert only_choice(whole)["finish_reason"] == "length"
    assert answer(island.http, COMPLETIONS, prompt=PROMPT, **GREEDY)["usage"]["completion_tokens"] == 16


def test_a_chat_that_the_template_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_checkpoint(folder, arch="llama", size="tiny")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with running_island(folder, {"gateway.http_port": 0}) as island:
        error = refused(post(island.http, CHATS, {"messages": CHAT}), 400)
    assert error["param"] == "messages"
    assert error["message"] == "messages: the chat template refuses these messages: roles must alternate"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_all_pages(island: Island, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 480, "stream": stream, **GREEDY}
    with (
        stopped_with_pages(island.workers[1]),
        httpx.Client(base_url=f"http://{island.http}", trust_env=False) as client,
    ):
        if stream:
            with client.stream("POST", COMPLETIONS, json=body) as response:
                assert "choices" in next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(COMPLETIONS, json=body, timeout=0.5)
    while island.gateway._requests.running or any(map(held_pages, island.workers)):  # the test's timeout bounds it
        time.sleep(0.01)
    assert answer(island.http, COMPLETIONS, prompt=PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2


def held_pages(worker: Worker) -> int:
    return worker.on_step_thread(lambda: worker.cache.pages.total - worker.cache.pages.free)


@contextmanager
def stopped_with_pages(worker: Worker) -> Iterator[None]:
    """Stops the worker's step thread before the first step that finds it with pages, until the block is left."""
    stopped, resume, thread = threading.Event(), threading.Event(), worker._step_thread
    assert thread is not None
    steps = thread._steps
    step = steps.step

    def stop_and_step() -> float | None:
        if not stopped.is_set() and worker.cache.pages.free < worker.cache.pages.total:
            stopped.set()
            resume.wait(30)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "step", stop_and_step)
        try:
            yield
            assert stopped.is_set()
        finally:
            resume.set()


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt_as_evaluations_ask(
    island: Island, folder: Path, tokenizer: Tokenizer, *, as_ids: bool
) -> None:
    """lm_eval's multiple choice needs sums of token_logprobs, and whether each token is the likeliest."""
    ids = tokenizer.encode(PROMPT)
    prompt: Any = ids if as_ids else PROMPT
    body = answer(island.http, COMPLETIONS, prompt=prompt, max_tokens=1, echo=True, logprobs=2, temperature=0)
    choice = only_choice(body)
    assert choice["text"].startswith(tokenizer.decode(ids))
    with torch.inference_mode():
        logits = load_oracle(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        len(ids) + 1
    ] * 4
    assert logprobs["tokens"][:-1] == [tokenizer.token_text(token) for token in ids]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    expected = [float(logits[position - 1, token]) for position, token in enumerate(ids) if position]
    assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    likeliest = [tokenizer.token_text(int(token)) for token in logits[:-1].argmax(-1)]
    assert [max(top, key=top.get) for top in logprobs["top_logprobs"][1:-1]] == likeliest


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_log_probabilities_of_the_prompt(island: Island, path: str) -> None:
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": CHAT}
    body = answer(island.http, path, **asked, max_tokens=0, prompt_logprobs=1)
    choice = only_choice(body)
    first, *rest = (choice if path == COMPLETIONS else body)["prompt_logprobs"]
    assert first is None
    assert len(rest) + 1 == body["usage"]["prompt_tokens"]
    for entry in rest:
        assert 1 <= len(entry) <= 2
        assert all(value["logprob"] <= 0 for value in entry.values())
        assert [value["rank"] for value in entry.values()][-1] == 1
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"n": 2, "echo": True}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_echoes_that_are_refused(island: Island, given: dict[str, Any], named: str) -> None:
    error = refused(post(island.http, COMPLETIONS, {"prompt": PROMPT, **given}), 400)
    assert error["param"] == named


@pytest.mark.parametrize("length", [1, 3000], ids=["short", "read in another process"])
def test_tokens_of_texts_and_back(island: Island, tokenizer: Tokenizer, length: int) -> None:
    text = "The cache! " * length
    body = answer(island.http, "/tokenize", prompt=text, return_token_strs=True)
    ids = tokenizer.encode(text)
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
    assert body["token_strs"] == [tokenizer.token_text(token) for token in ids]
    assert answer(island.http, "/detokenize", tokens=ids)["prompt"] == "<|begin|>" + text


def test_tokens_of_a_chat_are_those_of_its_request(island: Island) -> None:
    tokens = answer(island.http, "/tokenize", messages=CHAT)["tokens"]
    asked = answer(island.http, CHATS, messages=CHAT, max_tokens=1)
    assert asked["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {}, 400, "prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "give one of them"),
        ("/tokenize", {"prompt": 5}, 400, "prompt is 5; it must be text"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "'model' is served here"),
        ("/detokenize", {}, 400, "tokens is missing"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens has -1"),
        ("/detokenize", {"tokens": [1 << 40]}, 400, "tokens has 1099511627776"),
    ],
)
def test_what_cannot_be_tokenized(island: Island, path: str, body: dict[str, Any], status: int, said: str) -> None:
    assert said in refused(post(island.http, path, body), status)["message"]


def test_version_and_ping(island: Island) -> None:
    assert get(island.http, "/version").json() == {"version": __version__}
    assert get(island.http, "/ping").json() == {"status": "ok"}
    assert post(island.http, "/ping", {}).status_code == 200


def test_stop_reasons_are_what_was_asked_for(island: Island) -> None:
    free = only_choice(answer(island.http, COMPLETIONS, prompt=PROMPT, max_tokens=8, return_token_ids=True, **GREEDY))
    assert (free["finish_reason"], free["stop_reason"]) == ("length", None)
    fourth = free["token_ids"][3]
    asked: tuple[dict[str, Any], ...] = ({"stop_token_ids": [fourth]}, {"stop": ["\x00", free["text"][2]]})
    for given, reason in zip(asked, (fourth, free["text"][2]), strict=True):
        body = {"prompt": PROMPT, "max_tokens": 8, **GREEDY, **given}
        whole = only_choice(answer(island.http, COMPLETIONS, **body))
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", reason)
        *parts, last = [only_choice(one) for one in chunks(island.http, COMPLETIONS, stream=True, **body)]
        assert last["stop_reason"] == reason
        assert {part["stop_reason"] for part in parts} <= {None}
