"""Several answers and several prompts in one call over HTTP: each choice is what a call of its own gives."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_client import CHATS, COMPLETIONS, answer, chunks, post, refused, streaming
from tests.support.island import Island, running_island
from tests.support.oracle import random_prompt
from tests.support.waiting import until

TEXTS = ["The page is", "A prompt", "Once"]
CHAT = [{"role": "user", "content": "Where is the page?"}]
DRAWN: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True, "max_tokens": 10, "return_token_ids": True}
ASKED = {COMPLETIONS: {"prompt": TEXTS[0]}, CHATS: {"messages": CHAT}}
SEED = 40


@pytest.fixture(scope="module")
def island(small_model: Path) -> Iterator[Island]:
    with running_island(small_model, {"gateway.http_port": 0, "cache.num_pages": 512}) as island:
        yield island


def choices(island: Island, path: str, **body: Any) -> list[dict[str, Any]]:
    """Returns the choices, each by a call of its own, with index 0."""
    found = answer(island.http, path, **body)["choices"]
    assert [choice["index"] for choice in found] == list(range(len(found)))
    return found


def single(island: Island, path: str, **body: Any) -> dict[str, Any]:
    (choice,) = choices(island, path, **body)
    return choice


def streamed(parts: list[dict[str, Any]]) -> dict[int, tuple[str, list[int], str]]:
    """Returns text, tokens and finish reason of each choice of a stream."""
    texts, ids, reasons = defaultdict[int, str](str), defaultdict[int, list[int]](list), dict[int, str]()
    for part in parts:
        for choice in part["choices"]:
            index = choice["index"]
            assert index not in reasons
            first = index not in texts
            if "delta" in choice:
                assert choice["delta"].get("role") == ("assistant" if first else None)
            texts[index] += choice["delta"]["content"] if "delta" in choice else choice["text"]
            ids[index] += choice["token_ids"]
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return {index: (texts[index], ids[index], reasons[index]) for index in sorted(texts)}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_n_choices_are_those_of_single_calls(island: Island, path: str) -> None:
    logprobs: dict[str, Any] = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    asked = DRAWN | ASKED[path] | logprobs
    expected = [single(island, path, **asked, seed=SEED + index) for index in range(3)]
    found = choices(island, path, **asked, n=3, seed=SEED)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert {**one, "logprobs": None} == {**other, "logprobs": None, "index": index}
        assert str(one["logprobs"])[:40] == str(other["logprobs"])[:40]
    parts = chunks(island.http, path, **asked, n=3, seed=SEED, stream_options={"include_usage": True})
    (of_all,) = {(part["id"], part["created"], part["model"]) for part in parts}
    assert of_all[0]
    usage = parts[-1]["usage"]
    assert usage["completion_tokens"] == 30
    assert usage["prompt_tokens"] == answer(island.http, path, **asked)["usage"]["prompt_tokens"]
    assert [ids for _, ids, _ in streamed(parts).values()] == [one["token_ids"] for one in found]


@pytest.mark.parametrize("prompts", [TEXTS, [random_prompt(length, length) for length in (3, 20, 41)]])
@pytest.mark.parametrize("n", [1, 2])
def test_lists_of_prompts(island: Island, prompts: list[Any], n: int) -> None:
    expected = [
        single(island, COMPLETIONS, **DRAWN, prompt=prompt, seed=SEED + index)
        for prompt in prompts
        for index in range(n)
    ]
    asked = DRAWN | {"prompt": prompts, "n": n, "seed": SEED}
    found = choices(island, COMPLETIONS, **asked)
    assert found == [{**one, "index": index} for index, one in enumerate(expected)]
    usage = answer(island.http, COMPLETIONS, **asked)["usage"]
    alone = [answer(island.http, COMPLETIONS, prompt=prompt, max_tokens=1)["usage"] for prompt in prompts]
    assert usage["prompt_tokens"] == sum(one["prompt_tokens"] for one in alone)
    assert usage["completion_tokens"] == 10 * n * len(prompts)
    parts = chunks(island.http, COMPLETIONS, **asked)
    assert len({part["id"] for part in parts}) == 1
    assert streamed(parts) == {one["index"]: (one["text"], one["token_ids"], one["finish_reason"]) for one in found}


@pytest.mark.parametrize("prompt", [TEXTS[0], random_prompt(20, 1), TEXTS])
@pytest.mark.parametrize("options", [{"logprobs": 1}, {"logprobs": 0, "max_tokens": 0}, {"max_tokens": 0}, {}])
def test_a_stream_echoes_its_prompts_once(island: Island, prompt: Any, options: dict[str, Any]) -> None:
    asked = DRAWN | {"temperature": 0, "prompt": prompt, "echo": True} | options
    parts = chunks(island.http, COMPLETIONS, **asked)
    for choice in choices(island, COMPLETIONS, **asked):
        own = [one for part in parts for one in part["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        if prompt == TEXTS:
            assert own[0]["text"].startswith(TEXTS[choice["index"]])
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        logprobs = choice["logprobs"]
        for name in logprobs or ():
            joined = [value for one in own for value in one["logprobs"][name]]
            assert joined == logprobs[name] if name in ("tokens", "text_offset") else len(joined) == len(logprobs[name])


def test_best_of(island: Island) -> None:
    asked = DRAWN | {"prompt": TEXTS[0], "seed": SEED}
    drawn = choices(island, COMPLETIONS, **asked, n=4, logprobs=0)
    ranked = sorted(drawn, key=lambda one: -sum(one["logprobs"]["token_logprobs"]))
    best = choices(island, COMPLETIONS, **asked, n=2, best_of=4)
    assert [one["token_ids"] for one in best] == [one["token_ids"] for one in ranked[:2]]
    assert [one["logprobs"] for one in best] == [None, None]
    assert answer(island.http, COMPLETIONS, **asked, best_of=4)["usage"]["completion_tokens"] == 40


def test_a_fault_names_its_prompt(island: Island) -> None:
    long = [5] * 1000
    for body, message in (
        ({"prompt": ["fine", ""]}, "prompt[1] is empty"),
        ({"prompt": [[5], [6], [7, 512]]}, "prompt[2][1] is 512; the vocabulary has"),
        ({"prompt": [[5], long], "max_tokens": 2000}, "max_tokens is 2000 after a prompt of"),
    ):
        error = refused(post(island.http, COMPLETIONS, body), 400)
        assert message in error["message"]
    assert error["message"].startswith("prompt[")


def test_who_leaves_ends_all_answers(island: Island) -> None:
    body = DRAWN | {"prompt": TEXTS, "n": 4, "max_tokens": 300}
    with streaming(island.http, COMPLETIONS, **body) as lines:
        next(lines)
    until(lambda: island.gateway._requests.running == 0)
    until(lambda: all(worker.on_step_thread(lambda w=worker: w.cache.pages.free) == 512 for worker in island.workers))
