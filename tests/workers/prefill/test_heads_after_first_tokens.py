"""A head computes its part of a prompt after the first token is sampled, and before its KV is pushed or published."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.workers.config import SpeculationSettings
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.draft_heads import save_mtp
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, DECODE, PREFILL, LoopPair
from tests.workers.prefill.test_speculative_prefill import speculate

OUTPUT = 4
TARGET, FIRST_TOKEN, HEAD, PUSH, POST, PUBLISH = "target", "first token", "head", "push", "post", "publish"


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp(tmp_path_factory.mktemp("mtp"), "glm4_moe")


class Watched:
    """A pair with a head, and in which order its prefill worker launches what."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, sharing: bool = False) -> None:
        speculation = SpeculationSettings("mtp", 2, 16)
        self.pair = pair = LoopPair(folder, num_pages=64, sharing=sharing, speculation=speculation)
        self.events: list[str] = []
        self.following: list[int] = []  # the token after the last position, of each part that a head computed
        cache, runner = pair.caches[PREFILL], pair.runners[PREFILL]
        model: Any = runner._model

        def note(owner: Any, name: str, event: str) -> None:
            inner = getattr(owner, name)

            def noted(*arguments: Any, **named: Any) -> Any:
                self.events.append(event)
                return inner(*arguments, **named)

            monkeypatch.setattr(owner, name, noted)

        note(model, "_compute", TARGET)
        note(runner, "sample_async", FIRST_TOKEN)
        note(cache, "send_cached", PUSH)
        note(cache, "publish_prefix", PUBLISH)
        note(pair.transports[PREFILL], "post", POST)
        head = model.head

        def watched(hidden: Tensor, next_ids: Tensor, *rest: Any) -> Tensor:
            self.events.append(HEAD)
            self.following.append(int(next_ids[-1]))
            return head(hidden, next_ids, *rest)

        watched.taps, watched.enter, watched.logits = head.taps, head.enter, head.logits  # type: ignore[attr-defined]
        monkeypatch.setattr(model, "head", watched)

    def take(self) -> list[str]:
        events, self.events[:] = list(self.events), []
        return events

    def begin(self, name: str, prompt: list[int], params: SamplingParams | None = None) -> Any:
        reservation = self.pair.prepare(name, prompt, OUTPUT)
        params = params or self.pair.params(OUTPUT)
        result = self.pair.prefill.submit(name, spec_of(prompt), params, reservation)
        self.pair.start(name, reservation, OUTPUT, params)
        return result


@pytest.mark.parametrize("announced", [False, True])
def test_the_first_token_does_not_wait_for_the_head(
    mtp_folder: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """All of the head's KV is on its way when the signal is posted, and is there by its digest."""
    watched, prompt = Watched(mtp_folder, monkeypatch, sharing=True), random_prompt(CHUNK - 3, 0)
    if announced:
        speculate(watched.pair, "r", prompt)
        assert watched.take() == [TARGET]
    result = watched.begin("r", prompt)
    watched.pair.run_prefill()
    assert watched.take() == [*[TARGET][announced:], FIRST_TOKEN, HEAD, PUSH, POST, PUBLISH]
    watched.pair.run_decode()
    assert [result.result(0).first_token, *watched.pair.tokens("r")] == greedy(load_oracle(mtp_folder), prompt, OUTPUT)
    assert result.result(0).bytes_pushed == len(prompt) * watched.pair.transports[PREFILL].layout.token_bytes


def test_chunks_before_the_last_are_whole_at_once(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, prompt = Watched(mtp_folder, monkeypatch), random_prompt(CHUNK + 5, 0)
    watched.begin("r", prompt)
    watched.pair.run_prefill()
    assert watched.take() == [TARGET, HEAD, PUSH, TARGET, FIRST_TOKEN, HEAD, PUSH, POST]


def test_prompts_that_share_a_forward_are_sent_with_the_head(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, oracle = Watched(mtp_folder, monkeypatch), load_oracle(mtp_folder)
    prompts = {str(length): random_prompt(length, length) for length in (7, 8)}
    results = {name: watched.begin(name, prompt) for name, prompt in prompts.items()}
    watched.pair.run_prefill()
    assert watched.take() == [TARGET, FIRST_TOKEN, HEAD, POST, POST]
    watched.pair.run_decode()
    for name, prompt in prompts.items():
        result = results[name].result(0)
        assert [result.first_token, *watched.pair.tokens(name)] == greedy(oracle, prompt, OUTPUT)
        assert result.bytes_pushed == len(prompt) * watched.pair.transports[PREFILL].layout.token_bytes


def test_the_heads_last_entry_has_the_sampled_token(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, prompt = Watched(mtp_folder, monkeypatch), random_prompt(CHUNK - 3, 0)
    params = SamplingParams(max_tokens=OUTPUT, temperature=5.0, seed=3, ignore_eos=True)
    result = watched.begin("r", prompt, params)
    watched.pair.run_prefill()
    assert watched.following == [result.result(0).first_token]
    assert watched.following != greedy(load_oracle(mtp_folder), prompt, 1)


@pytest.mark.parametrize("sharing", [False, True])
def test_a_prompt_that_is_dropped_is_whole_where_it_is_published(
    mtp_folder: Path, monkeypatch: pytest.MonkeyPatch, sharing: bool
) -> None:
    watched, prompt = Watched(mtp_folder, monkeypatch, sharing=sharing), random_prompt(CHUNK - 3, 0)
    speculate(watched.pair, "r", prompt)
    assert watched.pair.prefill.abort("r").result(0)
    assert watched.take() == [TARGET, *([FIRST_TOKEN, HEAD, PUBLISH] if sharing else [])]
    watched.pair.caches[PREFILL].clear_prefixes()
    watched.pair.assert_free()


def test_pages_of_a_local_prompt_wait_for_the_head(mtp_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first token ends it, and can be read while the device still writes."""
    pair, past = Watched(mtp_folder, monkeypatch).pair, False
    monkeypatch.setattr(pair.runners[DECODE], "mark", lambda: lambda: past)
    reservation = pair.decode.prepare("r", spec_of(random_prompt(9, 0)), 1, DECODE)
    pair.start("r", reservation, 1)
    pair.run_decode()
    assert pair.ended("r") == FinishReason.LENGTH
    cache = pair.caches[DECODE]
    assert cache.num_free_pages < cache.num_pages
    past = True
    pair.step_decode()
    pair.assert_free()
