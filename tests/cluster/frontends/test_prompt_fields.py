"""Tests what happens to a prompt, and what answers tell of it: special tokens, truncation, ids, log-probabilities,
usage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.errors import InvalidRequest
from tandem.cluster.llm import connect
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.http_client import CHATS, COMPLETIONS, answer, chunks, post, refused
from tests.support.island import Island, running_island

TEXT = "the quick brown fox"
CHAT = [{"role": "user", "content": TEXT}]
LONGEST = 128
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
TOLD = {**GREEDY, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def island(model: Path) -> Iterator[Island]:
    with running_island(model, {"gateway.http_port": 0, "model.max_model_len": LONGEST}) as running:
        yield running


@pytest.fixture(scope="module")
def ids(model: Path) -> list[int]:
    """Returns the ids of TEXT, without the special token in front."""
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    return tokenizer.encode(TEXT, add_special_tokens=False)


def prompt_of(island: Island, **fields: Any) -> list[int]:
    """The prompt that was computed for a completion."""
    (choice,) = answer(island.http, COMPLETIONS, **TOLD, **fields)["choices"]
    return choice["prompt_token_ids"]


class TestSpecialTokens:
    def test_texts_have_them_by_default(self, island: Island, ids: list[int]) -> None:
        bos, *rest = prompt_of(island, prompt=TEXT)
        assert rest == ids
        assert prompt_of(island, prompt=TEXT, add_special_tokens=True) == [bos, *ids]
        assert prompt_of(island, prompt=TEXT, add_special_tokens=False) == ids

    def test_chats_have_those_of_their_template(self, island: Island) -> None:
        plain, more, none = (
            answer(island.http, CHATS, messages=CHAT, **TOLD, **fields)["prompt_token_ids"]
            for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
        )
        assert plain == none
        assert more == [plain[0], *plain]

    def test_token_ids_stay_as_they_are(self, island: Island) -> None:
        assert prompt_of(island, prompt=[5, 6, 7], add_special_tokens=True) == [5, 6, 7]

    def test_over_grpc(self, island: Island, ids: list[int]) -> None:
        options: dict[str, Any] = {**GREEDY, "return_prompt_token_ids": True}
        with Client(island.address) as client:
            first, *others = client.generate(TEXT, add_special_tokens=False, **options)
        assert list(first.prompt_token_ids) == ids
        assert not any(other.prompt_token_ids for other in others)

    def test_an_echo_names_the_first_token_that_there_is(self, island: Island) -> None:
        body = {**GREEDY, "prompt": TEXT, "echo": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        (choice,) = answer(island.http, COMPLETIONS, **body, add_special_tokens=False)["choices"]
        (first, *_) = prompt_of(island, prompt=TEXT, add_special_tokens=False)
        assert choice["logprobs"]["tokens"][0] == f"token_id:{first}"

    @pytest.mark.parametrize("adds", [True, False])
    def test_as_the_tokenizer_says(self, island: Island, adds: bool) -> None:
        said = answer(island.http, "/tokenize", prompt=TEXT, add_special_tokens=adds)
        assert said["tokens"] == prompt_of(island, prompt=TEXT, add_special_tokens=adds)


class TestTruncation:
    @pytest.mark.parametrize("kept", [1, 2, 500])
    def test_the_last_tokens_are_kept(self, island: Island, ids: list[int], kept: int) -> None:
        whole = prompt_of(island, prompt=TEXT)
        assert prompt_of(island, prompt=TEXT, truncate_prompt_tokens=kept) == whole[-kept:]
        assert prompt_of(island, prompt=ids, truncate_prompt_tokens=kept) == ids[-kept:]

    @pytest.mark.parametrize("prompt", [[*range(5, 25)] * 20, TEXT * 2000])  # the text is read in another process
    def test_as_many_as_fit(self, island: Island, model: Path, prompt: Any) -> None:
        kept = prompt_of(island, prompt=prompt, truncate_prompt_tokens=-1)
        tokenizer = Tokenizer.from_folder(model)
        assert tokenizer is not None
        whole = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
        assert kept == whole[-(LONGEST - GREEDY["max_tokens"]) :]

    def test_a_chat_that_names_no_length_keeps_room_for_its_answer(self, island: Island) -> None:
        body = {"messages": [{"role": "user", "content": TEXT * 200}], "temperature": 0, "ignore_eos": True}
        usage = answer(island.http, CHATS, **body, truncate_prompt_tokens=-1)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LONGEST // 2, LONGEST // 2)
        assert refused(post(island.http, CHATS, body), 400)["code"] == "context_length_exceeded"

    @pytest.mark.parametrize("kept", [0, -2, -(1 << 31)])
    def test_other_numbers_are_refused_by_name(self, island: Island, kept: int) -> None:
        error = refused(post(island.http, COMPLETIONS, {"prompt": TEXT, "truncate_prompt_tokens": kept}), 400)
        assert error["param"] == "truncate_prompt_tokens"
        assert error["message"] == f"truncate_prompt_tokens is {kept}; it must be at least 1, or -1 for as many as fit"
        with Client(island.address) as client, pytest.raises(InvalidRequest, match=r"^truncate_prompt_tokens is "):
            list(client.generate(TEXT, truncate_prompt_tokens=kept))

    def test_what_leaves_no_room_is_refused_all_the_same(self, island: Island) -> None:
        body = {"prompt": [5] * 200, "truncate_prompt_tokens": -1, "max_tokens": LONGEST}
        assert refused(post(island.http, COMPLETIONS, body), 400)["param"] == "max_tokens"
        body = {"prompt": [5] * 200, "truncate_prompt_tokens": LONGEST, "max_tokens": 1}
        assert refused(post(island.http, COMPLETIONS, body), 400)["code"] == "context_length_exceeded"
        error = refused(
            post(island.http, COMPLETIONS, {"prompt": TEXT, "echo": True, "truncate_prompt_tokens": 1}), 400
        )
        assert error["param"] == "echo"


class TestPromptIds:
    def test_each_choice_of_a_completion_has_them(self, island: Island) -> None:
        prompts = [[5, 6, 7], [8, 9]]
        choices = answer(island.http, COMPLETIONS, **TOLD, prompt=prompts, n=2, seed=1)["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]
        events = chunks(island.http, COMPLETIONS, **TOLD, prompt=prompts, n=2, seed=1)
        for index in range(4):
            own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            told = [choice.get("prompt_token_ids") for choice in own]
            assert told == [prompts[index // 2]] + [None] * (len(own) - 1)

    def test_a_chat_has_them_beside_its_choices(self, island: Island) -> None:
        whole = answer(island.http, CHATS, **TOLD, messages=CHAT, n=2)
        assert whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])
        assert not any("prompt_token_ids" in choice for choice in whole["choices"])
        first, *others = chunks(island.http, CHATS, **TOLD, messages=CHAT)
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in other for other in others)

    def test_only_where_they_are_asked_for(self, island: Island) -> None:
        whole = answer(island.http, CHATS, **GREEDY, messages=CHAT)
        assert "prompt_token_ids" not in whole
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = chunks(island.http, COMPLETIONS, **GREEDY, prompt=TEXT, stream_options=options)
        assert not any("prompt_token_ids" in choice for event in events for choice in event["choices"])

    def test_of_ranked_answers(self, island: Island) -> None:
        choices = answer(island.http, COMPLETIONS, **(TOLD | {"temperature": 1}), prompt=[5, 6], n=2, best_of=3)
        assert [choice["prompt_token_ids"] for choice in choices["choices"]] == [[5, 6]] * 2

    def test_in_python(self, island: Island, ids: list[int]) -> None:
        with connect(island.address) as llm:
            (output,) = llm.generate(TEXT, n=2, add_special_tokens=False, return_prompt_token_ids=True, **GREEDY)
        assert list(output.prompt_token_ids) == ids


class TestStreams:
    @pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": TEXT}), (CHATS, {"messages": CHAT})])
    @pytest.mark.parametrize("most", [4, 0])
    def test_prompt_logprobs_come_with_the_first_chunk(
        self, island: Island, path: str, prompt: dict[str, Any], most: int
    ) -> None:
        body = {**GREEDY, **prompt, "max_tokens": most, "prompt_logprobs": 1}
        said, events = answer(island.http, path, **body), chunks(island.http, path, **body)
        (whole,), (first, *others) = said["choices"], [event["choices"][0] for event in events]
        told, (begin, *rest) = (said, events) if path == CHATS else (whole, [first, *others])  # a chat has one prompt
        assert len(begin["prompt_logprobs"]) > 2
        assert begin["prompt_logprobs"] == told["prompt_logprobs"]
        assert not any("prompt_logprobs" in other for other in (*rest, *(said["choices"] if path == CHATS else ())))
        texts = [one["text"] if path == COMPLETIONS else one["delta"]["content"] for one in (first, *others)]
        assert "".join(texts) == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])

    def test_prompt_logprobs_of_several_prompts(self, island: Island) -> None:
        body = {**GREEDY, "prompt": [[5, 6, 7], [8, 9]], "prompt_logprobs": 0, "n": 2}
        events = chunks(island.http, COMPLETIONS, **body)
        told = {event["choices"][0]["index"]: event["choices"][0].get("prompt_logprobs") for event in events[::-1]}
        assert {index: len(entries or ()) for index, entries in told.items()} == {0: 3, 1: 0, 2: 2, 3: 0}

    @pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": TEXT}), (CHATS, {"messages": CHAT})])
    def test_usage_in_each_chunk(self, island: Island, path: str, prompt: dict[str, Any]) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = chunks(island.http, path, **TOLD, **prompt, n=2, stream_options=options)
        count = last["usage"]["prompt_tokens"]
        sent = {0: 0, 1: 0}
        for event in events:
            (choice,) = event["choices"]
            sent[choice["index"]] += len(choice["token_ids"])
            said = sent[choice["index"]]
            assert event["usage"] == {
                "prompt_tokens": count,
                "completion_tokens": said,
                "total_tokens": count + said,
            }
        assert last["usage"]["completion_tokens"] == sum(sent.values()) == 8

    def test_usage_of_chunks_needs_include_usage(self, island: Island) -> None:
        events = chunks(
            island.http, COMPLETIONS, **GREEDY, prompt=TEXT, stream_options={"continuous_usage_stats": True}
        )
        assert not any("usage" in event for event in events)
