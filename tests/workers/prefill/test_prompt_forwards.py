"""How the KV of prompts goes to its receiver: page to page for a lone prompt, else with its forwards."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, PropertyMock

import numpy as np
import pytest
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.workers.sampling.pending_samples import PendingSamples, Samples
from tests.cache.table_kernels import TableKernels
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, DECODE, PAGE, PREFILL, LoopPair
from tests.workers.prefill.test_speculative_prefill import speculate

OUTPUT = 4


class SentBefore:
    """Notes how many positions were on their way, all layers counted, when each forward was launched."""

    def __init__(self, pair: LoopPair) -> None:
        self.positions: list[float] = []
        self._pair = pair
        runner = pair.runners[PREFILL]
        self._forward = runner.forward
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, tokens: np.ndarray, plan: Forward, last_rows: np.ndarray, *rest: object) -> Tensor:
        self.positions.append(positions_sent(self._pair))
        return self._forward(tokens, plan, last_rows, *rest)  # type: ignore[arg-type]


def positions_sent(pair: LoopPair) -> float:
    return pair.bytes_written / pair.transports[PREFILL].layout.token_bytes


def submit(pair: LoopPair, name: str, prompt: list[int]) -> None:
    reservation = pair.prepare(name, prompt, OUTPUT)
    pair.start(name, reservation, OUTPUT)
    pair.send(name, prompt, reservation, OUTPUT)


def finish(pair: LoopPair, folder: Path, prompts: dict[str, list[int]]) -> None:
    pair.run_prefill()
    pair.run_decode()
    for name, prompt in prompts.items():
        assert pair.tokens(name) == greedy(load_oracle(folder), prompt, OUTPUT)[1:]
    for cache in pair.caches:
        cache.clear_prefixes()
    pair.assert_free()


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("matched", [0, 5 * PAGE])
def test_a_lone_prompt_goes_page_to_page_chunk_by_chunk(folder: Path, announced: bool, matched: int) -> None:
    pair, prompt = LoopPair(folder, sharing=bool(matched)), random_prompt(4 * CHUNK - 3, 0)
    if matched:
        pair.complete("before", prompt[:matched], 1)
        pair.caches[PREFILL].clear_prefixes()  # so that only the receiver has it
    sent_already = positions_sent(pair)
    sent_before = SentBefore(pair)
    if announced:
        speculate(pair, "r", prompt)
    submit(pair, "r", prompt)
    finish(pair, folder, {"r": prompt})
    assert [sent - sent_already for sent in sent_before.positions] == [
        max(begin - matched, 0) for begin in range(0, len(prompt), CHUNK)
    ]
    assert pair.tokens_written == 0
    assert positions_sent(pair) - sent_already == len(prompt) - matched


def test_a_prompt_that_is_no_longer_alone_is_sent_with_its_forwards(pair: LoopPair, folder: Path) -> None:
    prompts = {"alone": random_prompt(3 * CHUNK - 5, 0), "comes": random_prompt(CHUNK, 1)}
    submit(pair, "alone", prompts["alone"])
    pair.step_prefill()
    assert pair.tokens_written == 0
    submit(pair, "comes", prompts["comes"])
    sent_before = SentBefore(pair)
    finish(pair, folder, prompts)
    assert sent_before.positions == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert pair.tokens_written == 2 * CHUNK
    assert positions_sent(pair) == 4 * CHUNK - 5


def test_prompts_that_share_a_graph_are_sent_page_to_page(folder: Path) -> None:
    pair = LoopPair(folder, kernels=TableKernels)
    pair.runners[PREFILL].capture_prompts(CHUNK, RunInOnePlace())
    prompts = {"announced": random_prompt(CHUNK + 7, 0), "comes": random_prompt(5, 1), "waits": random_prompt(9, 2)}
    speculate(pair, "announced", prompts["announced"])
    for name, prompt in prompts.items():
        submit(pair, name, prompt)
    pair.step_prefill()
    assert positions_sent(pair) == 2 * CHUNK  # the speculative forward, and a forward of all three
    finish(pair, folder, prompts)
    assert positions_sent(pair) == sum(map(len, prompts.values()))
    assert pair.tokens_written == 0


def test_seconds_of_calls_that_write_are_divided_by_bytes(pair: LoopPair) -> None:
    meter: Any = MagicMock()
    type(meter).seconds = PropertyMock(side_effect=lambda: float(pair.bytes_written))
    pair.prefill._forwards._meter = meter
    prompts = {"long": random_prompt(3 * CHUNK - 5, 0), "short": random_prompt(CHUNK - 2, 1)}
    for name, prompt in prompts.items():
        submit(pair, name, prompt)
    requests = list(pair.prefill._handoff._requests.values())
    pair.run_prefill()
    for request in requests:
        assert request.bytes_pushed == request.num_tokens * pair.transports[PREFILL].layout.token_bytes
        assert request.push_seconds == pytest.approx(request.bytes_pushed)


def test_the_signal_is_posted_before_the_first_token_is_waited_for(
    pair: LoopPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It follows the sampling on the device; the receiver does not wait for the host."""
    transport, seen = pair.transports[PREFILL], []
    post, runner = transport.post, pair.runners[PREFILL]
    draw, pending = runner.sample_async, MagicMock()

    def drawing(*arguments: Any) -> tuple[Tensor, Any]:
        tokens, samples = draw(*arguments)
        pending.wait.side_effect = samples.wait
        return tokens, pending

    monkeypatch.setattr(runner, "sample_async", drawing)
    monkeypatch.setattr(transport, "post", lambda *row: (seen.append((pending.wait.called, drawn.done())), post(*row)))
    prompt = random_prompt(2 * CHUNK + 5, 0)
    pair.send("a", prompt, pair.prepare("a", prompt))
    drawn = pair.prefill._handoff._requests["a"].first_token
    pair.run_prefill()
    assert seen == [(False, False)]
    assert drawn.done()
    assert pending.wait.called


def test_a_quiet_push_is_answered_while_the_next_forward_computes(
    pair: LoopPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drained too late for the wait after its own forward."""
    prompt = random_prompt(37, 0)
    reservations = {name: pair.prepare(name, prompt) for name in "ab"}
    pair.fabric.hold(DECODE)
    first = pair.prefill.submit("a", spec_of(prompt), pair.params(4), reservations["a"])
    pair.run_prefill()
    assert not first.done()
    runner, seen = pair.runners[PREFILL], list[bool]()
    draw = runner.sample_async

    class Computing:
        def __init__(self, pending: PendingSamples) -> None:
            self._pending = pending

        def is_done(self) -> bool:
            pair.fabric.release(DECODE)
            return False

        def wait(self) -> Samples:
            seen.append(first.done())
            return self._pending.wait()

    def slow_draw(*arguments: Any) -> tuple[Tensor, Any]:
        drawn, pending = draw(*arguments)
        return drawn, Computing(pending)

    monkeypatch.setattr(runner, "sample_async", slow_draw)
    second = pair.prefill.submit("b", spec_of(prompt), pair.params(4), reservations["b"])
    pair.run_prefill()
    assert seen == [True]
    assert first.result(0).first_token == second.result(0).first_token
