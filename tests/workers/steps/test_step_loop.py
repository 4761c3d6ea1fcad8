"""One loop with both sides: workers that prefill for each other and decode at the same time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.workers.engine.engine import Engine
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.scheduling.batch import StepBatch
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, LoopPair

OUTPUT = 6


def test_workers_that_prefill_and_decode_at_once(folder: Path) -> None:
    pair, oracle = LoopPair(folder, num_pages=64), load_oracle(folder)
    one, other = pair.loops
    prompts = [random_prompt(length, length) for length in (5, CHUNK, 2 * CHUNK + 3, 3 * CHUNK, 9, CHUNK + 1)]
    streams, firsts, mixed = [], [], 0
    for number, prompt in enumerate(prompts):
        writer, sender, receiver = (0, one, other) if number % 2 else (1, other, one)
        name, stream = f"r{number}", TokenStream()
        reservation = receiver.decodes.prepare(name, spec_of(prompt), OUTPUT, writer)
        receiver.decodes.start(name, reservation.reservation_id, pair.params(OUTPUT), stream)
        firsts.append(sender.prefills.submit(name, spec_of(prompt), pair.params(OUTPUT), reservation))
        sender.prefills.attend(name)
        streams.append(stream)
        mixed += step_both(pair)
    while any(id(stream) not in pair.fanout.ended for stream in streams):
        mixed += step_both(pair)
    assert mixed > 0
    for prompt, first, stream in zip(prompts, firsts, streams, strict=True):
        assert pair.fanout.ended[id(stream)] == FinishReason.LENGTH
        tokens = [first.result(0).first_token, *pair.fanout.tokens[id(stream)]]
        assert tokens == greedy(oracle, prompt, OUTPUT)
    pair.assert_free()


def test_rows_do_not_wait_for_the_pages_of_a_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker decodes, and is to compute a prompt whose pages are on their way up."""
    pair, oracle = LoopPair(folder, num_pages=64), load_oracle(folder)
    prompts, streams, firsts, coming = [random_prompt(5, 1), random_prompt(9, 2)], [], [], [True]
    monkeypatch.setattr(Engine, "has_arrived", lambda engine, _: engine is not pair.loops[0].engine or not coming)
    for writer, prompt in zip((1, 0), prompts, strict=True):
        sender, receiver = pair.loops[writer], pair.loops[1 - writer]
        name, stream = f"r{writer}", TokenStream()
        reservation = receiver.decodes.prepare(name, spec_of(prompt), 3 * OUTPUT, writer)
        receiver.decodes.start(name, reservation.reservation_id, pair.params(3 * OUTPUT), stream)
        firsts.append(sender.prefills.submit(name, spec_of(prompt), pair.params(3 * OUTPUT), reservation))
        sender.prefills.attend(name)
        streams.append(stream)
        while not len(pair.loops[0].scheduler.rows):
            step_both(pair)
    for _ in range(OUTPUT):
        step_both(pair)
    assert len(pair.loops[0].scheduler.rows) == pair.loops[0].prefills.num_running == 1
    assert not firsts[1].done()
    coming.clear()
    while any(id(stream) not in pair.fanout.ended for stream in streams):
        step_both(pair)
    for prompt, first, stream in zip(prompts, firsts, streams, strict=True):
        tokens = [first.result(0).first_token, *pair.fanout.tokens[id(stream)]]
        assert tokens == greedy(oracle, prompt, 3 * OUTPUT)
    pair.assert_free()


def step_both(pair: LoopPair) -> int:
    """How many of the steps computed chunks of prompts beside decode rows."""
    mixed: list[bool] = []
    for loop in pair.loops:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.scheduler, "next_batch", noting(mixed, loop.scheduler.next_batch))
            loop.step()
    return sum(mixed)


def noting(mixed: list[bool], next_batch: Callable[..., StepBatch]) -> Callable[..., StepBatch]:
    def noted(**options: bool) -> StepBatch:
        batch = next_batch(**options)
        mixed.append(bool(batch.chunks) and batch.decodes is not None)
        return batch

    return noted
