import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.cache.plan.errors import InvalidArgument
from tandem.transfer.completion import (
    MAX_GENERATION,
    MAX_TOKENS,
    Signal,
    SignalBoard,
    is_newer,
    pack_payload,
    pack_signal,
    unpack_payload,
    unpack_signal,
)
from tandem.transfer.errors import NoFreeSignal


@settings(deadline=None)
@given(st.integers(1, MAX_GENERATION), st.integers(0, MAX_TOKENS))
def test_signal_words_round_trip_and_fit_an_int64(generation: int, tokens: int) -> None:
    word = pack_signal(generation, tokens)
    assert 0 < word < 2**63
    assert unpack_signal(int(np.int64(word))) == (generation, tokens)


@pytest.mark.parametrize(("generation", "tokens"), [(0, 1), (MAX_GENERATION + 1, 1), (1, -1), (1, MAX_TOKENS + 1)])
def test_parts_that_do_not_fit_are_refused(generation: int, tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="it must be from"):
        pack_signal(generation, tokens)


def test_rows_are_distinct_and_run_out() -> None:
    board = SignalBoard(3)
    held = [board.acquire() for _ in range(3)]
    assert {signal.row for signal in held} == {0, 1, 2}
    assert board.num_free == 0
    with pytest.raises(NoFreeSignal, match="all 3 mailbox rows"):
        board.acquire()
    board.release(held[1])
    assert board.acquire() == Signal(held[1].row, held[1].generation + 1)


def test_release_is_idempotent_and_spares_the_next_holder() -> None:
    board = SignalBoard(1)
    first = board.acquire()
    board.release(first)
    board.release(first)
    assert board.num_free == 1
    second = board.acquire()
    board.release(first)
    assert board.num_free == 0
    board.release(second)
    assert board.num_free == 1


def test_generations_start_again_after_the_last_and_skip_zero() -> None:
    board = SignalBoard(1)
    board._generations[0] = MAX_GENERATION
    assert board.acquire().generation == 1


def test_landed_counts_only_signals_of_the_asked_generation() -> None:
    board = SignalBoard(4)
    signals = [board.acquire() for _ in range(4)]
    board.release(signals[2])
    again = board.acquire()
    mailbox = np.zeros((4, 2), np.int64)
    mailbox[0] = pack_signal(signals[0].generation, 17), 5
    mailbox[2] = pack_signal(signals[2].generation, 99), 6  # late news of the use before
    mailbox[3] = pack_signal(signals[3].generation, MAX_TOKENS), 7
    asked = [signals[0], signals[1], again, signals[3]]
    slots = np.array([signal.row for signal in asked])
    generations = np.array([signal.generation for signal in asked])
    assert SignalBoard.landed(mailbox, slots, generations).tolist() == [17, 0, 0, MAX_TOKENS]
    assert SignalBoard.landed(mailbox, slots[:0], generations[:0]).shape == (0,)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_payload_words_round_trip_and_fit_an_int64(token: int, digest: int) -> None:
    word = pack_payload(token, digest)
    assert 0 <= word < 2**63
    assert unpack_payload(int(np.int64(word))) == (token, digest)


@pytest.mark.parametrize(("token", "digest"), [(-1, 0), (2**32, 0), (0, -1), (0, 2**31)])
def test_payload_parts_that_do_not_fit_are_refused(token: int, digest: int) -> None:
    with pytest.raises(InvalidArgument, match="it must be from"):
        pack_payload(token, digest)


@given(st.integers(1, MAX_GENERATION), st.integers(1, MAX_GENERATION // 2))
@example(MAX_GENERATION, MAX_GENERATION // 2)
def test_newer_generations_round_the_end(generation: int, uses: int) -> None:
    later = (generation - 1 + uses) % MAX_GENERATION + 1
    assert is_newer(later, generation)
    assert not is_newer(generation, later)
    assert not is_newer(generation, generation)


def test_a_signal_is_stale_once_and_only_under_another_use() -> None:
    board = SignalBoard(3)
    signals = [board.acquire() for _ in range(3)]
    mailbox = np.zeros((5, 2), np.int64)  # rows after those of the board are not its own
    mailbox[4] = 77
    assert board.count_stale(mailbox) == 0
    mailbox[0] = pack_signal(signals[0].generation, 9), 1
    mailbox[1] = pack_signal(signals[1].generation + 1, 9), 1
    assert board.count_stale(mailbox) == 1
    assert board.count_stale(mailbox) == 0
    board.release(signals[0])
    board.acquire()
    assert board.count_stale(mailbox) == 0, "what was seen before the slot's next use is not stale"
