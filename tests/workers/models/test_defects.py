"""Raises where nothing should. The request at hand fails, its caller gets an error, and nothing else is harmed."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.errors import ForwardFailed
from tandem.workers.requests.prefill_request import PrefillResult
from tandem.workers.sampling.finish import FinishReason
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, PREFILL, LoopPair

PROMPTS = [random_prompt(length, length) for length in (20, 21, 22)]
OUTPUT = 3


def raise_once(pair: LoopPair, pe: int, name: str, monkeypatch: pytest.MonkeyPatch, call: int = 2) -> None:
    """Makes the cache's method raise in that call from now on."""
    cache, calls = pair.caches[pe], [0]
    method = getattr(cache, name)

    def faulty(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("as the test says")
        return method(*arguments, **options)

    monkeypatch.setattr(cache, name, faulty)


@pytest.mark.parametrize(
    ("pe", "name", "output"),
    [
        (PREFILL, "add_sequence", OUTPUT),
        (PREFILL, "match_prefix", OUTPUT),
        (PREFILL, "reserve", OUTPUT),
        (DECODE, "publish_prefix", 1),
        (DECODE, "gather_group", OUTPUT),
    ],
)
def test_one_request_fails(folder: Path, pe: int, name: str, output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, oracle = LoopPair(folder, sharing=True), load_oracle(folder)
    answers: list[Future[PrefillResult]] = []
    raise_once(pair, pe, name, monkeypatch)
    for number, prompt in enumerate(PROMPTS):
        reservation = pair.prepare(f"r{number}", prompt, output)
        answers.append(pair.prefill.submit(f"r{number}", spec_of(prompt), pair.params(output), reservation))
        pair.prefill.attend(f"r{number}")
        pair.start(f"r{number}", reservation, output)
    pair.run_prefill()
    pair.run_decode()
    failed = 0
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        ended = pair.ended(f"r{number}")
        if isinstance(answer.exception(0), ForwardFailed):
            failed += 1
            pair.decode.abort(f"r{number}", writer_quiet=True)
        elif isinstance(ended, ForwardFailed):
            failed += 1
        else:
            assert ended == FinishReason.LENGTH
            assert [answer.result(0).first_token, *pair.tokens(f"r{number}")] == greedy(oracle, prompt, output)
    assert failed == 1
    for cache in pair.caches:
        cache.clear()
    pair.assert_free()


@pytest.mark.parametrize("name", ["add_sequence", "match_prefix", "reserve", "begin"])
def test_a_speculative_prefill_that_fails_fails_no_request(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompt = LoopPair(folder, sharing=True), PROMPTS[0]
    with monkeypatch.context() as patch:
        raise_once(pair, PREFILL, name, patch, call=1)
        pair.prefill.speculate("r", spec_of(prompt))
    assert pair.prefill.num_waiting == 0
    assert pair.complete("r", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    for cache in pair.caches:
        cache.clear()
    pair.assert_free()
