"""T5Gemma through both doors against transformers, greedy and in float32, and what is refused by name."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.errors import InvalidRequest
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, complete_all_updates, tokens_of
from tests.support.encoder_models import WINDOW, greedy_behind, save_t5gemma
from tests.support.http_client import COMPLETIONS, answer, post, refused
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.waiting import until

COUNT = WINDOW + 8
LENGTHS = (1, 7, 8, 25, 61)  # pages have 8 positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t5gemma")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    """Makes an encoder that is wider than the decoder, as in 9b-2b."""
    return save_t5gemma(folder, encoder={"hidden_size": 96, "head_dim": 24, "num_hidden_layers": 3})


@pytest.fixture(
    scope="module",
    params=[pytest.param((1, 1), marks=pytest.mark.long), (2, 2), (0, 1)],
    ids=["1P1D", "2P2D", "one worker"],
)
def island(request: pytest.FixtureRequest, folder: Path, oracle: Any) -> Iterator[Island]:
    prefill, decode = request.param
    settings = {"island.num_prefill": prefill, "island.num_decode": decode, "gateway.http_port": 0}
    with running_island(folder, settings | {"scheduler.roles": "split" if prefill else "colocated"}) as running:
        yield running


def test_prompts_of_unlike_lengths_at_once(island: Island, oracle: Any) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    expected = [greedy_behind(oracle, prompt, COUNT) for prompt in prompts]
    assert complete_all(island.address, prompts, max_tokens=COUNT, **GREEDY) == expected


@pytest.mark.parametrize("length", [1, 9, 70])
def test_the_decoder_begins_with_its_prompt(island: Island, oracle: Any, length: int) -> None:
    """The longest prompt comes in chunks; the first one begins with decoder_start_token_id itself."""
    encoder, decoder = random_prompt(40, seed=3), random_prompt(length, seed=4)
    expected = greedy_behind(oracle, encoder, COUNT, decoder)
    given = [1, *decoder] if length == 1 else decoder
    usages = []
    for _ in range(2):  # the second finds both as a prefix
        updates = complete(island.address, encoder, decoder_prompt=given, max_tokens=COUNT, **GREEDY)
        assert tokens_of(updates) == expected
        usages.append(updates[-1].usage)
    assert all(usage is not None and usage.prompt_tokens == 40 + 1 + length for usage in usages)
    assert usages[-1] is not None
    assert usages[-1].cached_tokens == 40 + length // 8 * 8


def test_http(island: Island, oracle: Any) -> None:
    encoder, decoder = random_prompt(33, seed=8), random_prompt(5, seed=9)
    body: dict[str, Any] = {"model": "t5gemma", "max_tokens": COUNT, "return_token_ids": True, **GREEDY}
    model = answer(island.http, COMPLETIONS, **{**body, "model": _model(island)}, prompt=encoder)
    assert model["choices"][0]["token_ids"] == greedy_behind(oracle, encoder, COUNT)
    body["model"] = _model(island)
    for halves in ({"encoder_prompt": encoder}, {"prompt": encoder}):
        whole = answer(island.http, COMPLETIONS, **body, **halves, decoder_prompt=decoder)
        assert whole["choices"][0]["token_ids"] == greedy_behind(oracle, encoder, COUNT, decoder)
        assert whole["choices"][0]["prompt_token_ids"] == [*encoder, 1, *decoder]
        assert whole["usage"]["prompt_tokens"] == 33 + 6


def _model(island: Island) -> str:
    return island.gateway._names.model[0]


def test_further_answers_share_the_encoders_pages(island: Island, oracle: Any) -> None:
    prompt = random_prompt(50, seed=5)
    updates = complete(island.address, prompt, n=3, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True)
    answers = {index: [t for u in updates if u.index == index for t in u.token_ids] for index in range(3)}
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    for index, tokens in answers.items():  # each is what its seed gives alone
        alone = complete(island.address, prompt, temperature=1.0, seed=4 + index, max_tokens=12, ignore_eos=True)
        assert tokens_of(alone) == tokens
    (greedy,) = complete_all(island.address, [prompt], max_tokens=12, **GREEDY)
    assert greedy == greedy_behind(oracle, prompt, 12)


def test_penalties_count_the_decoders_tokens_alone(island: Island, oracle: Any) -> None:
    """transformers gives the decoder's ids to its processors, too."""
    prompt = random_prompt(20, seed=6)
    expected = greedy_behind(oracle, prompt, 12, repetition_penalty=3.0)
    assert expected != greedy_behind(oracle, prompt, 12)
    (penalised,) = complete_all(island.address, [prompt], max_tokens=12, repetition_penalty=3.0, **GREEDY)
    assert penalised == expected


def test_refusals(island: Island) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": random_prompt(65, 0)}, "the encoder's prompt has 65 tokens; it may have at most 64"),
        ({"decoder_prompt": random_prompt(250, 0)}, "the decoder's context of 256 leaves at most 5"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is set; a model with an encoder"),
        ({"sliding": {"window": 16, "sinks": 2}}, "sliding is set; the model has an encoder"),
        ({"decoder_prompt": [500]}, r"decoder_prompt\[1\] is 500; the vocabulary has 199"),
        ({"encoder_prompt": [5]}, "encoder_prompt and token_bytes are both set; set only one"),
        ({"decoder_prompt": "text"}, "decoder_prompt.text: the checkpoint has no tokenizer"),
    ]
    for changes, reason in cases:
        with pytest.raises(InvalidRequest, match=reason):
            complete(island.address, **{"prompt": [5, 6, 7], "max_tokens": 16, **GREEDY, **changes})
    body = {"model": _model(island), "prompt": [5], "encoder_prompt": [6]}
    error = refused(post(island.http, COMPLETIONS, body), 400)
    assert "encoder_prompt and prompt are both set" in error["message"]


def test_model_info_says_how_long_an_encoders_prompt_may_be(island: Island) -> None:
    with island.client() as client:
        assert client.model_info().max_encoder_tokens == 64


def test_speculation_by_ngrams_changes_no_token(folder: Path, oracle: Any) -> None:
    prompts = [random_prompt(30, seed=20) * 2, random_prompt(9, seed=21)]
    expected = [greedy_behind(oracle, prompt, COUNT) for prompt in prompts]
    with running_island(folder, {"speculation.method": "ngram", "speculation.tokens": 3}) as island:
        assert complete_all(island.address, prompts, max_tokens=COUNT, **GREEDY) == expected


def test_workers_that_compute_what_they_decode(folder: Path, oracle: Any) -> None:
    prompts = [random_prompt(length, seed=40 + length) for length in (3, 20, 64, 40, 17)]
    expected = [greedy_behind(oracle, prompt, COUNT) for prompt in prompts]
    with running_island(folder, {"scheduler.roles": "adaptive"}) as island:
        assert complete_all(island.address, prompts, max_tokens=COUNT, **GREEDY) == expected
        updates = complete_all_updates(island.address, prompts, max_tokens=COUNT, **GREEDY)
        assert [tokens_of(one) for one in updates] == expected


@pytest.mark.gate("True")
@pytest.mark.parametrize("sharing", [True, False])
def test_requests_that_move_lose_no_token(
    folder: Path, oracle: Any, sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shared prefixes both prompts go page to page, else they are computed again."""
    prompts, count = [random_prompt(length, seed=length) for length in (8, 19, 40, 61)], 120
    expected = [greedy_behind(oracle, prompt, count) for prompt in prompts]
    move_back_and_forth(len(prompts), monkeypatch)
    with running_island(folder, {"scheduler.roles": "adaptive", "cache.prefix_sharing": sharing}) as island:
        with ThreadPoolExecutor(len(prompts)) as pool:
            ran = list(pool.map(lambda one: complete(island.address, one, max_tokens=count, **GREEDY), prompts))
        assert [tokens_of(updates) for updates in ran] == expected
        timings = [updates[-1].timings for updates in ran]
        assert sum(one.moves for one in timings if one is not None) >= 2


@pytest.mark.gate("split")
@pytest.mark.parametrize("roles", ["split", "adaptive"])
def test_cancelled_requests_leave_nothing(folder: Path, oracle: Any, roles: str) -> None:
    chance = random.Random(7)
    with running_island(folder, {"scheduler.roles": roles}) as island:

        def cancel_soon(number: int) -> None:
            with Client(island.address) as client:
                stream = client.generate(random_prompt(1 + number, number), timeout=60, max_tokens=100, **GREEDY)
                for _ in range(chance.randrange(4)):
                    next(stream)
                stream.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(cancel_soon, range(40)))
        prompt = random_prompt(30, 99)
        assert complete_all(island.address, [prompt], max_tokens=9, **GREEDY) == [greedy_behind(oracle, prompt, 9)]
        until(lambda: all(TvmCache.of(one.cache).is_empty for one in island.workers))
        assert all(one.cache.pages.free == one.cache.pages.total for one in island.workers)


def test_a_model_without_an_encoder_refuses_both_prompts(tmp_path: Path) -> None:
    with running_island(save_checkpoint("llama", tmp_path), {"gateway.http_port": 0}) as island:
        for name in ("encoder_prompt", "decoder_prompt"):
            with pytest.raises(InvalidRequest, match=f"{name} is set; this model has no encoder"):
                complete(island.address, [5, 6], max_tokens=2, **{name: [7]})
            body = {"model": _model(island), "max_tokens": 2, **({} if name == "encoder_prompt" else {"prompt": [5]})}
            error = refused(post(island.http, COMPLETIONS, {**body, name: [7]}), 400)
            assert error["param"] == name
            assert "this model has no encoder" in error["message"]
