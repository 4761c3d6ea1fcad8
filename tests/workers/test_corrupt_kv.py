"""KV that arrives otherwise than it was sent: its digest is not the sender's, and the request fails."""

from pathlib import Path

import pytest

from tandem.workers.errors import CorruptKV
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.workers.loop_pair import DECODE, LoopPair

PROMPT = random_prompt(37, 0)  # 5 pages of 8, three chunks of 16


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return greedy(load_oracle(folder), PROMPT, 4)


def test_one_wrong_bit_fails_the_request(pair: LoopPair, expected: list[int]) -> None:
    reservation = pair.prepare("a", PROMPT)
    pair.send("a", PROMPT, reservation)
    pair.start("a", reservation)
    pair.step_prefill()
    pair.fabric.corrupt_next(DECODE)
    pair.run_prefill()
    pair.run_decode()
    assert isinstance(pair.ended("a"), CorruptKV)
    assert pair.tokens("a") == []
    assert pair.decode_counters.corrupt == 1
    pair.assert_free()
    assert pair.complete("b", PROMPT) == expected


def test_a_wrong_bit_in_a_page_that_was_sent_from_the_cache_fails_the_request(folder: Path) -> None:
    pair = LoopPair(folder, sharing=True)
    pair.complete("a", PROMPT)
    pair.caches[DECODE].clear_prefixes()
    reservation = pair.prepare("b", PROMPT)
    pair.send("b", PROMPT, reservation)
    pair.start("b", reservation)
    pair.fabric.corrupt_next(DECODE)
    pair.run_prefill()
    pair.run_decode()
    assert isinstance(pair.ended("b"), CorruptKV)
    assert pair.prepare("c", PROMPT).matched_tokens == 0
