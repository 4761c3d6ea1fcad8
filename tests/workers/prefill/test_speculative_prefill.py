"""Speculative prefill: what is sent of a prompt that is computed before its reservation comes, and how it ends."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.workers.errors import Aborted
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, DECODE, LEASE, PAGE, PREFILL, LoopPair

OUTPUT = 4


class CountedForwards:
    """Notes how many tokens each forward of the prefill worker computes; `fails` of them raise."""

    def __init__(self, pair: LoopPair) -> None:
        self.counts: list[int] = []
        self.fails = 0
        runner = pair.runners[PREFILL]
        self._forward: Callable[..., Tensor] = runner.forward
        runner.forward = self  # type: ignore[method-assign]

    def __call__(self, token_ids: np.ndarray, plan: Forward, last_rows: np.ndarray, *rest: object) -> Tensor:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("as the test says")
        self.counts.append(len(token_ids))
        return self._forward(token_ids, plan, last_rows, *rest)


def speculate(pair: LoopPair, request_id: str, prompt: list[int]) -> None:
    pair.prefill.speculate(request_id, spec_of(prompt))
    pair.step_prefill()


def pages_in_use(pair: LoopPair) -> int:
    return pair.caches[PREFILL].num_pages - pair.caches[PREFILL].num_free_pages


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("length", [1, 5, CHUNK - 1, CHUNK])
def test_a_speculative_prompt_is_computed_once_and_sent(folder: Path, length: int, sharing: bool) -> None:
    pair = LoopPair(folder, sharing=sharing)
    forwards, prompt = CountedForwards(pair), random_prompt(length, length)
    for number in range(2):  # the second time a part of it is in the prefix index of either worker
        forwards.counts.clear()
        speculate(pair, f"r{number}", prompt)
        cached = (length - 1) // PAGE * PAGE if sharing and number else 0
        assert forwards.counts == [length - cached]
        assert not pair.in_flight
        reservation = pair.prepare(f"r{number}", prompt, OUTPUT)
        written = pair.bytes_written
        tokens = pair.finish(f"r{number}", prompt, reservation, OUTPUT)
        assert tokens == greedy(load_oracle(folder), prompt, OUTPUT)
        token_bytes = pair.transports[PREFILL].layout.token_bytes
        assert pair.bytes_written - written == (length - reservation.matched_tokens) * token_bytes
        assert forwards.counts == [length - cached]
    for cache in pair.caches:
        cache.clear_prefixes()
    pair.assert_free()


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 3])
def test_the_first_forward_of_a_long_prompt_is_speculative(folder: Path, length: int, sharing: bool) -> None:
    pair = LoopPair(folder, sharing=sharing)
    forwards, prompt = CountedForwards(pair), random_prompt(length, length)
    speculate(pair, "r", prompt)
    assert forwards.counts == [CHUNK]
    assert not pair.in_flight
    reservation = pair.prepare("r", prompt, OUTPUT)
    written = pair.bytes_written
    assert pair.finish("r", prompt, reservation, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    token_bytes = pair.transports[PREFILL].layout.token_bytes
    assert pair.bytes_written - written == (length - reservation.matched_tokens) * token_bytes
    assert sum(forwards.counts) == length
    for cache in pair.caches:
        cache.clear_prefixes()
    pair.assert_free()


def test_what_is_cached_of_a_prompt_does_not_make_it_too_long(folder: Path) -> None:
    pair = LoopPair(folder, sharing=True)
    forwards, prompt = CountedForwards(pair), random_prompt(3 * CHUNK, 0)
    pair.complete("r", prompt[: 2 * CHUNK], OUTPUT)
    speculate(pair, "longer", prompt)
    assert forwards.counts[-1] == CHUNK
    assert pair.complete("longer", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    assert len(forwards.counts) == 3


def test_another_prompt_than_was_announced_is_computed_again(pair: LoopPair, folder: Path) -> None:
    prompt = random_prompt(CHUNK, 1)
    speculate(pair, "r", [*prompt[:10], *random_prompt(6, 2)])
    assert pair.complete("r", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    pair.assert_free()


def abort(pair: LoopPair) -> None:
    assert pair.prefill.abort("gw/r").result(0)
    assert not pair.prefill.abort("gw/r").result(0)


def release(pair: LoopPair) -> None:
    (answer,) = pair.prefill.release("gw/")
    assert answer.result(0)


def expire(pair: LoopPair) -> None:
    pair.clock.now += LEASE
    pair.step_prefill()


@pytest.mark.parametrize("end", [abort, release, expire])
def test_what_nobody_sends_ends(pair: LoopPair, end: Callable[[LoopPair], None]) -> None:
    speculate(pair, "gw/r", random_prompt(CHUNK, 0))
    assert pages_in_use(pair) > 0
    assert pair.prefill.num_waiting == 1
    end(pair)
    assert pair.prefill.num_waiting == 0
    pair.assert_free()


def test_what_was_computed_for_nothing_is_a_prefix_for_the_next(folder: Path) -> None:
    pair = LoopPair(folder, sharing=True)
    forwards, prompt = CountedForwards(pair), random_prompt(CHUNK, 0)
    speculate(pair, "withdrawn", prompt)
    pair.prefill.abort("withdrawn")
    assert pair.complete("again", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    assert forwards.counts == [CHUNK, PAGE]


def test_its_pages_come_back_though_it_cannot_become_a_prefix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = LoopPair(folder, sharing=True)
    speculate(pair, "r", random_prompt(9, 1))
    assert pages_in_use(pair)

    def fail(*_: object) -> None:
        raise MemoryError("as the test says")

    monkeypatch.setattr(pair.caches[PREFILL], "publish_prefix", fail)
    with pytest.raises(MemoryError):
        pair.prefill._speculative.drop()
    assert not pages_in_use(pair)


def test_an_announcement_after_its_end_is_not_heeded(pair: LoopPair) -> None:
    prompt = random_prompt(CHUNK, 0)
    pair.complete("done", prompt, OUTPUT)
    pair.prefill.abort("aborted")
    pair.prefill.release("gone/")
    for request_id in ("done", "aborted", "gone/r"):
        speculate(pair, request_id, prompt)
        pair.assert_free()
    with pytest.raises(Aborted):
        pair.send("aborted", prompt, pair.prepare("aborted", prompt))


def test_a_busy_worker_prefills_nothing_speculatively(pair: LoopPair) -> None:
    forwards, prompt = CountedForwards(pair), random_prompt(3 * CHUNK, 0)
    pair.send("first", prompt, pair.prepare("first", prompt))
    for _ in range(2):  # while it waits, and between its chunks
        speculate(pair, "second", random_prompt(CHUNK, 1))
        assert pair.prefill.num_waiting == 0
    pair.run_prefill()
    assert forwards.counts == [CHUNK] * 3


def test_one_speculative_prompt_at_a_time(pair: LoopPair) -> None:
    speculate(pair, "first", random_prompt(CHUNK - 1, 0))
    in_use = pages_in_use(pair)
    assert in_use > 0
    speculate(pair, "second", random_prompt(CHUNK, 1))
    assert pages_in_use(pair) == in_use
    assert pair.prefill.num_waiting == 1


def test_its_pages_are_for_prompts_with_a_reservation(folder: Path) -> None:
    pair = LoopPair(folder, num_pages=6)
    oracle, ahead, other = load_oracle(folder), random_prompt(CHUNK, 0), random_prompt(36, 1)
    speculate(pair, "ahead", ahead)
    assert pair.complete("other", other, OUTPUT) == greedy(oracle, other, OUTPUT)
    assert pair.complete("ahead", ahead, OUTPUT) == greedy(oracle, ahead, OUTPUT)
    pair.assert_free()


def test_a_prompt_that_needs_more_than_is_free_waits_for_its_reservation(folder: Path) -> None:
    pair = LoopPair(folder, num_pages=1)
    speculate(pair, "r", random_prompt(CHUNK, 0))
    pair.assert_free()


@pytest.mark.parametrize("fails", [1, 2])
def test_a_speculative_forward_that_fails_fails_no_request(pair: LoopPair, folder: Path, fails: int) -> None:
    forwards, prompt = CountedForwards(pair), random_prompt(CHUNK, 0)
    forwards.fails = fails
    for _ in range(fails):
        speculate(pair, "r", prompt)
    pair.assert_free()
    assert pair.complete("r", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
    pair.assert_free()


def test_a_write_that_fails_ends_the_request_and_no_more(pair: LoopPair, folder: Path) -> None:
    prompt = random_prompt(CHUNK, 0)
    speculate(pair, "r", prompt)
    pair.fabric.fail_next("write_slots", DECODE)
    future = pair.prefill.submit("r", spec_of(prompt), pair.params(OUTPUT), pair.prepare("r", prompt))
    for _ in range(2):  # the write, and that all before it is quiet
        pair.run_prefill()
    assert "write_slots" in str(future.exception(0))
    assert pair.decode.abort("r", writer_quiet=True)
    pair.assert_free()
    assert pair.complete("again", prompt, OUTPUT) == greedy(load_oracle(folder), prompt, OUTPUT)
