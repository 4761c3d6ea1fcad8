"""Each race of a reservation, and what holds against it: every test here fails when its protection is taken out."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.workers.counters import Counters
from tandem.workers.errors import (
    Aborted,
    InvalidCall,
    LeaseExpired,
    NoRoom,
    StaleEpoch,
    StaleReservation,
)
from tandem.workers.requests.token_stream import TokenStream
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, DECODE, LEASE, PREFILL, LoopPair

MORE_THAN_A_STEP_ASKS = 20
PROMPT, OTHER = random_prompt(37, 0), random_prompt(37, 1)  # 5 pages of 8, three chunks of 16


@pytest.fixture(scope="module")
def oracle(folder: Path) -> dict[int, list[int]]:
    model = load_oracle(folder)
    return {len(prompt) * 1000 + prompt[0]: greedy(model, prompt, 4) for prompt in (PROMPT, OTHER)}


def expected(oracle: dict[int, list[int]], prompt: list[int]) -> list[int]:
    return oracle[len(prompt) * 1000 + prompt[0]]


def test_the_pair_serves(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    assert pair.complete("a", PROMPT) == expected(oracle, PROMPT)
    assert pair.complete("b", OTHER) == expected(oracle, OTHER)
    pair.assert_free()
    decode, prefill = pair.decode_counters, pair.prefill_counters
    assert (decode.reservations, prefill.pushes) == (2, 2)
    assert prefill.bytes_pushed > 0
    nothing = Counters()
    assert replace(decode, reservations=0) == replace(prefill, pushes=0, bytes_pushed=0) == nothing


def test_late_writes_after_a_cancel_hit_nobody(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    """The writer has not heard of the cancel, and writes into pages that must not be another request's by then."""
    reservation = pair.prepare("a", PROMPT)
    pair.decode.abort("a", writer_quiet=False)
    other = pair.prepare("b", OTHER)
    pair.send("b", OTHER, other)
    pair.start("b", other)
    pair.run_prefill()
    pair.send("a", PROMPT, reservation)
    pair.run_prefill()
    assert pair.bytes_written == 2 * 37 * pair.caches[0].layout.token_bytes
    pair.run_decode()
    assert pair.tokens("b") == expected(oracle, OTHER)[1:]
    pair.assert_free()


def test_pages_of_a_cancelled_reservation_never_return_by_time(folder: Path) -> None:
    pair = LoopPair(folder, num_pages=8)
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.step_prefill()
    pair.decode.abort("a", writer_quiet=False)
    for _ in range(20):
        pair.clock.now += 1e6
        pair.step_decode()
        with pytest.raises(NoRoom):
            pair.prepare("b", OTHER)
    assert pair.caches[DECODE].num_draining_pages == 5
    pair.step_prefill()
    pair.step_decode()
    pair.assert_free()


def test_a_map_of_another_epoch_is_not_written_to(pair: LoopPair) -> None:
    reservation = replace(pair.prepare("a", PROMPT), epoch=2)
    with pytest.raises(StaleEpoch):
        pair.send("a", PROMPT, reservation)
    pair.run_prefill()
    assert pair.bytes_written == 0
    assert pair.prefill_counters.stale_calls == 1


def test_a_reservation_for_an_earlier_writer_is_not_written_to(pair: LoopPair) -> None:
    """Another process had this one's place when its receiver made it."""
    reservation = pair.prepare("a", PROMPT)
    assert reservation.writer_epoch == reservation.epoch == 1
    with pytest.raises(StaleEpoch, match="epoch is 2"):
        pair.send("a", PROMPT, replace(reservation, writer_epoch=2))
    pair.run_prefill()
    assert pair.bytes_written == 0
    with pytest.raises(StaleEpoch, match="epoch of PE 0 is 2; it is at epoch 1"):
        pair.decode.prepare("b", spec_of(PROMPT), 4, writer_pe=PREFILL, writer_epoch=2)


def test_a_reservation_for_another_writer_is_not_written_to(pair: LoopPair) -> None:
    """Only the writer that a reservation names can be asked to be quiet."""
    reservation = pair.decode.prepare("a", spec_of(PROMPT), 4, writer_pe=DECODE)
    with pytest.raises(InvalidCall, match="writer_pe is 1"):
        pair.send("a", PROMPT, reservation)
    with pytest.raises(InvalidCall, match="writer_pe is 2"):
        pair.decode.prepare("b", spec_of(PROMPT), 4, writer_pe=2)


def test_a_prefix_is_not_shared_before_it_has_landed(folder: Path, oracle: dict[int, list[int]]) -> None:
    pair = LoopPair(folder, sharing=True)
    first = pair.prepare("a", PROMPT)
    pair.send("a", PROMPT, first)
    pair.step_prefill()
    pair.start("a", first)
    pair.step_decode()
    second = pair.prepare("b", PROMPT)
    assert second.matched_tokens == 0
    pair.run_prefill()
    third = pair.prepare("c", PROMPT)
    assert third.matched_tokens == 0, "landed, but nobody has looked"
    pair.run_decode()
    fourth = pair.prepare("d", PROMPT)
    assert fourth.matched_tokens == 32
    assert pair.tokens("a") == expected(oracle, PROMPT)[1:]
    assert pair.finish("d", PROMPT, fourth) == expected(oracle, PROMPT)
    assert pair.finish("b", PROMPT, second) == expected(oracle, PROMPT)


def test_a_prefix_that_did_not_land_is_never_shared(folder: Path) -> None:
    pair = LoopPair(folder, sharing=True)
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.step_prefill()
    pair.decode.abort("a", writer_quiet=False)
    pair.heed_recalls()
    assert pair.prepare("b", PROMPT).matched_tokens == 0


def test_a_late_completion_is_not_lost_nor_taken_for_the_next(folder: Path, oracle: dict[int, list[int]]) -> None:
    """One slot: its next use must wait until the earlier writer cannot post any more."""
    pair = LoopPair(folder, num_signals=1)
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.step_prefill()
    pair.decode.abort("a", writer_quiet=False)
    with pytest.raises(NoRoom, match="mailbox rows"):
        pair.prepare("b", OTHER)
    pair.run_prefill()  # a completes all the same
    pair.step_decode()
    assert pair.complete("b", OTHER) == expected(oracle, OTHER)
    assert pair.decode_counters.stale_signals == 0
    pair.assert_free()


def test_a_completion_before_an_abort_is_not_stale(folder: Path, oracle: dict[int, list[int]]) -> None:
    """One slot: nobody has looked at it before its next use."""
    pair = LoopPair(folder, num_signals=1)
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.run_prefill()
    pair.decode.abort("a", writer_quiet=True)
    assert pair.complete("b", OTHER) == expected(oracle, OTHER)
    assert pair.decode_counters.stale_signals == 0
    pair.assert_free()


def test_a_completion_that_comes_before_its_stream_is_not_lost(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    reservation = pair.prepare("a", PROMPT)
    pair.send("a", PROMPT, reservation)
    pair.run_prefill()
    pair.step_decode()
    pair.start("a", reservation)
    pair.run_decode()
    assert pair.tokens("a") == expected(oracle, PROMPT)[1:]


def test_a_signal_of_another_use_is_counted_and_lands_nothing(folder: Path) -> None:
    pair = LoopPair(folder, verify=False)
    reservation = pair.prepare("a", PROMPT)
    pair.start("a", reservation)
    other_use = reservation.generation + 1 << 40 | 37
    pair.transports[PREFILL].post(DECODE, reservation.signal_slot, other_use, 5)
    pair.step_decode()
    assert pair.decode.num_running == 0
    assert pair.decode_counters.stale_signals == 1


def test_a_doubled_send_writes_nothing_into_the_next_owners_pages(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    reservation = pair.prepare("a", PROMPT)
    first = pair.finish("a", PROMPT, reservation)[0]
    other = pair.prepare("b", OTHER)
    assert other.wire_map == reservation.wire_map, "b has the pages that a had"
    written = pair.bytes_written
    again = pair.prefill.submit("a", spec_of(PROMPT), pair.params(4), reservation)
    assert again.result(0).first_token == first
    with pytest.raises(StaleReservation):
        pair.send("a under another name", PROMPT, reservation)
    pair.run_prefill()
    assert pair.bytes_written == written
    assert pair.finish("b", OTHER, other) == expected(oracle, OTHER)
    assert pair.prefill_counters.stale_calls == 1


def test_a_send_that_comes_after_its_abort_writes_nothing(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    """The receiver knows that the writer is quiet: its pages are another's."""
    reservation = pair.prepare("a", PROMPT)
    assert not pair.prefill.abort("a").result(0)
    pair.decode.abort("a", writer_quiet=True)
    other = pair.prepare("b", OTHER)
    assert other.wire_map == reservation.wire_map, "b has the pages that a had"
    with pytest.raises(Aborted):
        pair.send("a", PROMPT, reservation)
    pair.run_prefill()
    assert pair.bytes_written == 0
    assert pair.finish("b", OTHER, other) == expected(oracle, OTHER)


def test_a_second_stream_is_refused(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    reservation = pair.prepare("a", PROMPT)
    pair.start("a", reservation)
    with pytest.raises(InvalidCall, match="has a stream already"):
        pair.decode.start("a", reservation.reservation_id, pair.params(4), TokenStream())
    pair.send("a", PROMPT, reservation)
    pair.run_prefill()
    pair.run_decode()
    assert pair.tokens("a") == expected(oracle, PROMPT)[1:]


def test_an_abort_between_chunks_leaves_nothing_in_flight(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.step_prefill()
    written = pair.bytes_written
    assert written == CHUNK * pair.caches[0].layout.token_bytes
    assert pair.in_flight > 0
    answer = pair.prefill.abort("a")
    pair.step_prefill()
    assert answer.result(0)
    assert pair.in_flight == 0
    pair.decode.abort("a", writer_quiet=True)
    pair.assert_free()
    pair.run_prefill()
    assert pair.bytes_written == written
    assert pair.complete("b", OTHER) == expected(oracle, OTHER)


def test_a_lease_that_ends_while_pushing_stops_the_writer_before_the_receiver(pair: LoopPair) -> None:
    reservation = pair.prepare("a", PROMPT)
    result = pair.prefill.submit("a", spec_of(PROMPT), pair.params(4), reservation)
    pair.step_prefill()
    written = pair.bytes_written
    pair.clock.now += 0.9 * LEASE
    pair.step_prefill()
    assert isinstance(result.exception(0), LeaseExpired)
    assert pair.bytes_written == written
    assert pair.in_flight == 0
    assert pair.prefill_counters.expired_leases == 1
    pair.step_decode()
    assert pair.decode_counters.expired_leases == 0
    pair.clock.now += 0.2 * LEASE
    pair.heed_recalls()
    assert pair.decode_counters.expired_leases == 1
    pair.assert_free()


def test_a_lease_does_not_run_while_a_call_waits(pair: LoopPair, oracle: dict[int, list[int]]) -> None:
    reservation = pair.prepare("a", PROMPT)
    pair.start("a", reservation)
    pair.send("a", PROMPT, reservation)
    pair.step_prefill()
    pair.clock.now += 100 * LEASE
    pair.run_prefill()
    pair.run_decode()
    assert pair.tokens("a") == expected(oracle, PROMPT)[1:]


def test_a_call_that_leaves_lets_the_lease_run_again(pair: LoopPair) -> None:
    result = pair.prefill.submit("a", spec_of(PROMPT), pair.params(4), pair.prepare("a", PROMPT))
    lease = pair.prefill.attend("a")
    assert lease is not None
    pair.clock.now += 100 * LEASE
    lease.leave()
    pair.step_prefill()
    assert not result.done()
    pair.clock.now += LEASE
    pair.step_prefill()
    assert isinstance(result.exception(0), LeaseExpired)


def test_an_expired_reservation_is_not_written_to_by_a_send_that_comes_late(pair: LoopPair) -> None:
    """The gateway died after PrepareReceive, its RemoteSend is under way: no one but the writer can end that."""
    reservation = pair.prepare("a", PROMPT)
    pair.clock.now += LEASE
    pair.step_decode()
    assert pair.caches[DECODE].num_draining_pages == 5
    pair.heed_recalls()
    pair.assert_free()
    with pytest.raises(StaleReservation):
        pair.send("a", PROMPT, reservation)
    with pytest.raises(StaleReservation, match="expired"):
        pair.start("a", reservation)
    pair.run_prefill()
    assert pair.bytes_written == 0


def test_a_recall_stops_a_push_between_its_chunks(pair: LoopPair) -> None:
    reservation = pair.prepare("a", PROMPT)
    result = pair.prefill.submit("a", spec_of(PROMPT), pair.params(4), reservation)
    pair.start("a", reservation)
    pair.step_prefill()
    written = pair.bytes_written
    pair.decode.abort("a", writer_quiet=False)
    pair.heed_recalls()
    assert isinstance(result.exception(0), Aborted)
    assert pair.bytes_written == written
    pair.assert_free()


def test_a_recall_is_answered_only_when_the_writer_is_quiet(pair: LoopPair) -> None:
    pair.send("a", PROMPT, pair.prepare("a", PROMPT))
    pair.step_prefill()
    assert pair.in_flight > 0
    pair.decode.abort("a", writer_quiet=False)
    for _ in range(MORE_THAN_A_STEP_ASKS):
        pair.fabric.fail_next("is_quiet", DECODE)
    pair.heed_recalls()
    assert pair.caches[DECODE].num_draining_pages == 5
    assert pair.prefill_counters.recalled == 0
    for _ in range(MORE_THAN_A_STEP_ASKS):
        pair.heed_recalls()
    pair.assert_free()
    assert pair.prefill_counters.recalled == 1


def test_an_abort_is_answered_only_when_the_writer_is_quiet(pair: LoopPair) -> None:
    """The abort comes between the writer's chunks, and when all is computed and its signal may still be under way."""
    for steps in (1, 3):
        reservation = pair.prepare(f"a{steps}", PROMPT)
        pair.send(f"a{steps}", PROMPT, reservation)
        pair.fabric.hold(DECODE)
        for _ in range(steps):
            pair.step_prefill()
        answer = pair.prefill.abort(f"a{steps}")
        pair.step_prefill()
        assert pair.in_flight > 0
        assert not answer.done()
        pair.fabric.release(DECODE)
        pair.step_prefill()
        assert answer.result(0)
        assert pair.in_flight == 0
        pair.decode.abort(f"a{steps}", writer_quiet=True)
        pair.assert_free()


def test_a_lease_that_ends_lets_nothing_go_that_may_still_be_written(pair: LoopPair) -> None:
    """The writer stops at once; pages on both sides stay until what it had written has landed."""
    result = pair.prefill.submit("a", spec_of(PROMPT), pair.params(4), pair.prepare("a", PROMPT))
    pair.step_prefill()
    pair.fabric.hold(DECODE)
    pair.clock.now += 0.9 * LEASE
    for _ in range(3):
        pair.step_prefill()
    assert pair.bytes_written == CHUNK * pair.caches[0].layout.token_bytes
    assert pair.prefill_counters.expired_leases == 1
    assert not result.done()
    assert pair.caches[PREFILL].num_free_pages < pair.caches[PREFILL].num_pages
    pair.fabric.release(DECODE)
    pair.step_prefill()
    assert isinstance(result.exception(0), LeaseExpired)
    pair.clock.now += 0.2 * LEASE
    pair.heed_recalls()
    pair.assert_free()


def test_a_recall_that_could_not_be_posted_is_posted_again(pair: LoopPair) -> None:
    pair.prepare("a", PROMPT)
    pair.fabric.fail_next("post", PREFILL)
    pair.decode.abort("a", writer_quiet=False)
    pair.heed_recalls()
    assert pair.caches[DECODE].num_draining_pages == 5
    pair.heed_recalls()
    pair.assert_free()


def test_many_recalls_take_turns_in_one_lane(pair: LoopPair) -> None:
    for number in range(5):
        pair.prepare(f"r{number}", random_prompt(9, number))
        pair.decode.abort(f"r{number}", writer_quiet=False)
    for left in (4, 3, 2, 1, 0):
        pair.heed_recalls()
        assert pair.caches[DECODE].num_draining_pages == 2 * left
    pair.assert_free()
    assert pair.decode_counters.recalled == pair.prefill_counters.recalled == 5


def test_the_gateways_word_frees_pages_while_their_recall_is_under_way(
    pair: LoopPair, oracle: dict[int, list[int]]
) -> None:
    """Its answer, when it comes, must not be taken for anything else."""
    for request_id in ("a", "b"):
        pair.prepare(request_id, PROMPT)
        pair.decode.abort(request_id, writer_quiet=False)
    pair.step_decode()  # a's recall is posted, b's waits
    assert pair.decode.abort("a", writer_quiet=True)
    assert pair.decode.abort("b", writer_quiet=True)
    assert not pair.decode.abort("b", writer_quiet=True)
    pair.assert_free()
    assert pair.complete("c", OTHER) == expected(oracle, OTHER)
    pair.prepare("d", PROMPT)
    pair.decode.abort("d", writer_quiet=False)
    pair.heed_recalls()
    pair.heed_recalls()
    pair.assert_free()


def test_prompts_wait_while_the_cache_has_its_most_sequences(folder: Path, oracle: dict[int, list[int]]) -> None:
    """There are pages for all of them; several decode workers can offer room to more than a prefill worker keeps."""
    pair = LoopPair(folder, num_pages=64, max_sequences=(2, 64))
    prompts = {name: (PROMPT, OTHER)[number % 2] for number, name in enumerate("abcde")}
    for name, prompt in prompts.items():
        pair.prefill.speculate(name, spec_of(prompt))
        reservation = pair.prepare(name, prompt)
        pair.send(name, prompt, reservation)
        pair.start(name, reservation)
    pair.run_prefill()
    pair.run_decode()
    for name, prompt in prompts.items():
        assert pair.tokens(name) == expected(oracle, prompt)[1:]
    pair.assert_free()
