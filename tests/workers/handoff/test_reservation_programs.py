"""Any order of calls, steps and time: no page is another's while a write may land, none is lost, tokens are right."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.transfer.wire_map import decode_map
from tandem.workers.errors import Aborted, InvalidCall, NoRoom, Stale
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.reservation import Reservation
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, LEASE, PAGE, PREFILL, LoopPair

PROMPTS = [random_prompt(length, length) for length in (5, 17, 37)] + [random_prompt(37, 37)[:20] + [7] * 10]
OUTPUT = 3
NUM_PAGES, NUM_SIGNALS = 14, 3  # too few of either for all

ACTIONS = (
    *("prepare", "prepare", "announce", "announce", "send", "send", "start", "start", "hang up", "abort", "abort both"),
    *("prefill", "prefill", "prefill", "decode", "decode", "post fails", "wait"),
)


@dataclass
class Known:
    """A request as a gateway knows it."""

    prompt: int
    reservation: Reservation
    pages: np.ndarray
    lease: Lease | None = None


class Gateway:
    """Does what a gateway may do, in an order that none would choose."""

    def __init__(self, pair: LoopPair) -> None:
        self.pair = pair
        self.known: dict[str, Known] = {}
        self.started: dict[str, int] = {}

    def act(self, action: str, number: int) -> None:
        pair, request_id = self.pair, f"r{number}"
        known = self.known.get(request_id)
        with suppress(NoRoom, InvalidCall, Stale, Aborted):
            if action == "prepare":
                prompt = (len(self.known) + number) % len(PROMPTS)
                request_id = f"r{len(self.known)}"
                reservation = pair.prepare(request_id, PROMPTS[prompt], OUTPUT)
                self.known[request_id] = Known(prompt, reservation, self._pages(reservation))
            elif action == "prefill":
                pair.step_prefill()
            elif action == "decode":
                pair.step_decode()
            elif action == "post fails":
                pair.fabric.fail_next("post", PREFILL)
            elif action == "wait":
                pair.clock.now += (0.05, 1, LEASE / 2, LEASE, 2 * LEASE, 5 * LEASE)[number]
            elif known is not None:
                self._act_on(action, number, known)

    def _act_on(self, action: str, number: int, known: Known) -> None:
        pair, request_id = self.pair, f"r{number}"
        if action == "announce":  # sometimes of another prompt than is sent
            prompt = PROMPTS[(known.prompt + (number == 0)) % len(PROMPTS)]
            pair.prefill.speculate(request_id, spec_of(prompt))
        elif action == "send":
            pair.prefill.submit(request_id, spec_of(PROMPTS[known.prompt]), pair.params(OUTPUT), known.reservation)
            known.lease = known.lease or pair.prefill.attend(request_id)
        elif action == "hang up" and known.lease is not None:
            known.lease.leave()
            known.lease = None
        elif action == "start":
            pair.start(request_id, known.reservation, OUTPUT)
            self.started[request_id] = known.prompt
        elif action == "abort":
            pair.decode.abort(request_id, writer_quiet=False)
        elif action == "abort both":
            answer = pair.prefill.abort(request_id)
            pair.step_prefill()
            if answer.done():
                pair.decode.abort(request_id, writer_quiet=True)

    def _pages(self, reservation: Reservation) -> np.ndarray:
        """Returns the pages that the writer is to write."""
        wire = reservation.wire_map
        assert wire is not None
        position_map = decode_map(
            wire,
            self.pair.caches[DECODE].layout,
            num_pages=(NUM_PAGES,),
            expected_start=wire.start_position,
            expected_tokens=wire.num_tokens,
        )
        return position_map.runs[0].slots() // PAGE

    def check_pages(self) -> None:
        """Checks that pages that the writer writes, or may still write, are held for a writer."""
        writers = self.pair.caches[DECODE]._pools.allocators[0]._writers
        for request_id, known in self.known.items():
            if self._may_be_written(request_id, known):
                assert writers[known.pages].min() > 0, f"{request_id} may still be written"

    def _may_be_written(self, request_id: str, known: Known) -> bool:
        handoff = self.pair.prefill._handoff
        if request_id in handoff._requests:
            return True
        if handoff._ended.is_aborted(request_id) or handoff._ended.result(request_id) is not None:
            return False
        try:
            handoff._grants.check(known.reservation, len(PROMPTS[known.prompt]))
        except Stale:
            return False
        return True

    def go_away(self) -> None:
        """Its connections end; leases, recalls and time do the rest."""
        for request_id, known in self.known.items():
            if known.lease is not None:
                known.lease.leave()
            self.pair.decode.abort(request_id, writer_quiet=False)
        for _ in range(150):  # more than posts that fail and recalls that wait for each other
            self.pair.clock.now += LEASE
            self.pair.step_prefill()
            self.pair.step_decode()


@pytest.fixture(scope="module")
def oracle(folder: Path) -> list[list[int]]:
    model = load_oracle(folder)
    return [greedy(model, prompt, OUTPUT) for prompt in PROMPTS]


@pytest.mark.gate("True")
@pytest.mark.parametrize("sharing", [False, True])
@settings(max_examples=30)
@given(program=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=10, max_size=60))
def test_any_program(folder: Path, oracle: list[list[int]], sharing: bool, program: list[tuple[str, int]]) -> None:
    pair = LoopPair(folder, num_pages=NUM_PAGES, num_signals=NUM_SIGNALS, sharing=sharing)
    gateway = Gateway(pair)
    for action, number in program:
        gateway.act(action, number)
        gateway.check_pages()
    gateway.go_away()
    for request_id, prompt in gateway.started.items():
        ended, tokens = pair.ended(request_id), pair.tokens(request_id)
        assert ended in (FinishReason.LENGTH, FinishReason.ABORT), ended
        expected = oracle[prompt][1:]
        assert tokens == (expected if ended == FinishReason.LENGTH else expected[: len(tokens)])
    assert pair.decode_counters.stale_signals == 0
    pair.assert_free()
