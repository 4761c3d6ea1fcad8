"""Two workers. Each computes prompts for the other and for itself, and decodes, all at the same time."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.workers.config import ParkingSettings
from tandem.workers.errors import Aborted, InvalidCall, NoRoom, Stale
from tandem.workers.handoff.handoff import Handoff
from tandem.workers.prefill.forwards import PromptForwards
from tandem.workers.requests.prefill_request import PrefillResult
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.wire.lease import Lease
from tandem.workers.wire.reservation import Reservation
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import CHUNK, LEASE, LoopPair
from tests.workers.steps.test_step_loop import step_both

OUTPUT, LONG_OUTPUT = 5, 24
REQUESTS = 200
AT_ONCE = 12
ROUTES = ((0, 1), (1, 0), (0, 0), (1, 1))  # who computes the prompt, who decodes
LENGTHS = (3, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 40, 40, 9, 3 * CHUNK)
PROMPTS = [random_prompt(length, min(number, 5)) for number, length in enumerate(LENGTHS)]  # some begin alike


@pytest.fixture(scope="module")
def longer(folder: Path) -> list[list[int]]:
    return greedy_all(load_oracle(folder), PROMPTS, LONG_OUTPUT)


@pytest.fixture(scope="module")
def expected(longer: list[list[int]]) -> list[list[int]]:
    return [tokens[:OUTPUT] for tokens in longer]


@dataclass(eq=False)
class Asked:
    """One request as its gateway knows it."""

    name: str
    prompt: int
    sender: int
    receiver: int
    reservation: Reservation
    stream: TokenStream | None = None
    first: "Future[PrefillResult] | None" = None
    lease: Lease | None = None
    aborts: list["Future[bool]"] = field(default_factory=list)


class Gateway:
    """Calls what a gateway may call, in any order; now and then it forgets a request."""

    def __init__(self, pair: LoopPair, seed: int, output: int) -> None:
        self.pair, self.output = pair, output
        self.random = random.Random(seed)
        self.all: list[Asked] = []
        self.open: list[Asked] = []
        self.refused = 0

    def ask(self) -> None:
        prompt, (sender, receiver) = self.random.randrange(len(PROMPTS)), self.random.choice(ROUTES)
        name = f"r{len(self.all) + self.refused}"
        try:
            reservation = self.pair.loops[receiver].decodes.prepare(name, spec_of(PROMPTS[prompt]), self.output, sender)
        except NoRoom:
            self.refused += 1
            return
        asked = Asked(name, prompt, sender, receiver, reservation)
        self.all.append(asked)
        self.open.append(asked)

    def go_on(self, asked: Asked) -> None:
        calls: list[Callable[[Asked], None]] = [
            self._start,
            self._send,
            self._start,
            self._send,
            self._drop,
            self._abort,
        ]
        weights = (8, 8, 8, 8, 1, 1)
        with suppress(Stale, InvalidCall, Aborted):
            self.random.choices(calls, weights)[0](asked)

    def _start(self, asked: Asked) -> None:
        if asked.stream is None:
            stream, reservation = TokenStream(), asked.reservation
            decodes = self.pair.loops[asked.receiver].decodes
            decodes.start(asked.name, reservation.reservation_id, self.pair.params(self.output), stream)
            asked.stream = stream

    def _send(self, asked: Asked) -> None:
        if asked.first is None and asked.sender != asked.receiver:
            prefills, params = self.pair.loops[asked.sender].prefills, self.pair.params(self.output)
            asked.first = prefills.submit(asked.name, spec_of(PROMPTS[asked.prompt]), params, asked.reservation)
            asked.lease = prefills.attend(asked.name)

    def _drop(self, asked: Asked) -> None:
        """The gateway dies for this request: leases and recalls do the rest."""
        self.open.remove(asked)
        self.pair.loops[asked.receiver].decodes.abort(asked.name, writer_quiet=False)
        if asked.lease is not None:
            asked.lease.leave()

    def _abort(self, asked: Asked) -> None:
        self.open.remove(asked)
        asked.aborts = self.pair.loops[asked.sender].abort(asked.name, False)

    def heed_aborts(self) -> None:
        """The word of a writer that is quiet, on its way to the receiver."""
        for asked in self.all:
            if asked.aborts and all(answer.done() for answer in asked.aborts):
                asked.aborts = []
                self.pair.loops[asked.receiver].abort(asked.name, True)

    def forget_ended(self) -> None:
        ended = self.pair.fanout.ended
        self.open = [asked for asked in self.open if asked.stream is None or id(asked.stream) not in ended]


OVERCOMMIT = ParkingSettings(most=16, seconds=1e6, reserved_output=0.1)


@pytest.mark.parametrize(
    ("sharing", "seed", "parking", "output"),
    [
        pytest.param(False, 0, ParkingSettings(), OUTPUT, id="no sharing"),
        pytest.param(True, 1, ParkingSettings(), OUTPUT, id="sharing"),
        pytest.param(True, 4, OVERCOMMIT, LONG_OUTPUT, id="overcommit"),
    ],
)
def test_a_storm_of_both_ways_loses_no_page_and_no_token(
    folder: Path, longer: list[list[int]], sharing: bool, seed: int, parking: ParkingSettings, output: int
) -> None:
    pair = LoopPair(folder, num_pages=34 if parking.most else 72, num_signals=8, sharing=sharing, parking=parking)
    gateway = Gateway(pair, seed, output)
    while len(gateway.all) < REQUESTS or gateway.open:
        if len(gateway.all) < REQUESTS and len(gateway.open) < AT_ONCE:
            gateway.ask()
        if gateway.open:
            gateway.go_on(gateway.random.choice(gateway.open))
        pair.clock.now += gateway.random.choice((0, 0, 0, 0.05, 0.05, LEASE / 3))
        for loop in gateway.random.sample(pair.loops, gateway.random.randrange(3)):
            loop.step()
        gateway.heed_aborts()
        gateway.forget_ended()
        gateway.open = [asked for asked in gateway.open if not is_over(pair, asked)]
    complete = come_to_an_end(pair, gateway, longer)
    assert complete > REQUESTS // 4
    counters = [loop.counters for loop in pair.loops]
    assert min(counter.recalled for counter in counters) > 0
    assert sum(counter.expired_leases for counter in counters) > 0
    assert sum(counter.stale_signals for counter in counters) == 0
    assert all(counter.parks > 0 for counter in counters) == bool(parking.most)
    assert [loop.engine.pages.parked_bytes_used for loop in pair.loops] == [0, 0]


def is_over(pair: LoopPair, asked: Asked) -> bool:
    """Its reservation has expired, so that no stream will tell of its end."""
    return asked.stream is None and pair.loops[asked.receiver].decodes._reservations.get(asked.name) is None


def come_to_an_end(pair: LoopPair, gateway: Gateway, longer: list[list[int]]) -> int:
    """How many requests were served; their tokens are right, and so is the beginning of all others'."""
    for asked in gateway.all:
        if asked.lease is not None:
            asked.lease.leave()
    for _ in range(60):
        pair.clock.now += LEASE
        gateway.heed_aborts()
        for loop in pair.loops:
            loop.step()
    complete = 0
    for asked in gateway.all:
        tokens = pair.fanout.tokens.get(id(asked.stream), [])
        awaited = longer[asked.prompt][asked.sender != asked.receiver : gateway.output]
        assert tokens == awaited[: len(tokens)]
        if pair.fanout.ended.get(id(asked.stream)) == FinishReason.LENGTH:
            assert tokens == awaited
            complete += 1
    for cache in pair.caches:
        cache.clear_prefixes()
    pair.assert_free()
    return complete


def ask(pair: LoopPair, name: str, prompt: list[int], route: tuple[int, int], output: int = OUTPUT) -> TokenStream:
    """One request from beginning to end, as far as calls go."""
    sender, receiver = route
    reservation, stream = pair.loops[receiver].decodes.prepare(name, spec_of(prompt), output, sender), TokenStream()
    pair.loops[receiver].decodes.start(name, reservation.reservation_id, pair.params(output), stream)
    if sender != receiver:
        pair.loops[sender].prefills.submit(name, spec_of(prompt), pair.params(output), reservation)
        pair.loops[sender].prefills.attend(name)
    return stream


def test_requests_whose_prompts_are_computed_here_take_pages_as_they_grow(
    folder: Path, longer: list[list[int]]
) -> None:
    """Three that would reserve 24 pages begin on 18."""
    pair = LoopPair(folder, num_pages=18, parking=OVERCOMMIT)
    streams = [ask(pair, name, PROMPTS[4], (1, 1), LONG_OUTPUT) for name in "abc"]
    assert [request.reserved for request in pair.decode._reservations._requests.values()] == [44] * 3
    ended = list[int]()
    for _ in range(400):
        pair.clock.now += 0.3
        pair.step_decode()
        ended += [at for at, one in enumerate(streams) if at not in ended and id(one) in pair.fanout.ended]
    assert ended[0] == 0  # the first one never gives way
    assert [pair.fanout.tokens[id(stream)] for stream in streams] == [longer[4]] * 3
    assert pair.decode_counters.parks > 0
    pair.assert_free()


def test_a_parked_request_goes_on_though_prompts_for_a_peer_come_without_end(folder: Path) -> None:
    """It needs 10 of 12 pages, and prompts use 5 or more at any time. They wait once it has waited for a second."""
    prompt = random_prompt(20, 1)
    undisturbed = LoopPair(folder, num_pages=12)
    due = ask(undisturbed, "long", prompt, (1, 1), 60)
    undisturbed.run_decode()
    pair = LoopPair(folder, num_pages=12, parking=replace(OVERCOMMIT, seconds=1.0))
    long, open_ = ask(pair, "long", prompt, (0, 0), 60), list[TokenStream]()
    for number in range(500):
        with suppress(NoRoom):
            open_.append(ask(pair, f"r{number}", PROMPTS[4], (0, 1), 2))
        pair.clock.now += 0.05
        step_both(pair)
        open_ = [one for one in open_ if id(one) not in pair.fanout.ended]
        if id(long) in pair.fanout.ended:
            break
    assert pair.fanout.tokens[id(long)] == undisturbed.fanout.tokens[id(due)]
    assert pair.prefill_counters.parks > 0
    for _ in range(60):
        step_both(pair)
    assert all(pair.fanout.ended[id(one)] == FinishReason.LENGTH for one in open_)
    pair.assert_free()


def test_workers_do_not_wait_for_each_other_with_requests_that_are_parked_for_too_long(
    folder: Path, expected: list[list[int]]
) -> None:
    """On each worker one is parked. Its place is held for KV, for which the other worker has the prompt."""
    pair = LoopPair(folder, num_pages=64, most=1, parking=ParkingSettings(most=4, seconds=0.5))
    streams, params = [TokenStream() for _ in range(4)], pair.params(OUTPUT)
    for priority in (5, 0):
        spec, offers = replace(spec_of(PROMPTS[1]), priority=priority), list[Reservation]()
        for pe, loop in enumerate(pair.loops):
            name, writer = f"{priority} at {pe}", pe if priority else 1 - pe
            offers.append(loop.decodes.prepare(name, spec, OUTPUT, writer))
            loop.decodes.start(name, offers[pe].reservation_id, params, streams[2 * (not priority) + pe])
        for _ in range(3):
            pair.clock.now += 0.3
            step_both(pair)
    assert [loop.engine.pages.parked for loop in pair.loops] == [1, 1]
    for pe, loop in enumerate(pair.loops):
        loop.prefills.submit(f"0 at {1 - pe}", spec, params, offers[1 - pe])
        loop.prefills.attend(f"0 at {1 - pe}")
    for _ in range(40):
        step_both(pair)
    tokens = [pair.fanout.tokens.get(id(stream)) for stream in streams]
    assert tokens == [expected[1]] * 2 + [expected[1][1:]] * 2
    pair.assert_free()


def test_a_prompt_of_its_own_beside_rows_and_beside_one_for_a_peer(folder: Path, expected: list[list[int]]) -> None:
    pair, mixed = LoopPair(folder, num_pages=96), 0
    routes = ((0, 1), (0, 0), (1, 1), (0, 1), (1, 0), (1, 1), (0, 0), (1, 0))
    streams = []
    for number, route in enumerate(routes):
        streams.append(ask(pair, f"r{number}", PROMPTS[number], route))
        mixed += step_both(pair)
    while any(id(stream) not in pair.fanout.ended for stream in streams):
        mixed += step_both(pair)
    assert mixed > 0
    for prompt, (sender, receiver), stream in zip(expected, routes, streams, strict=True):
        assert pair.fanout.tokens[id(stream)] == prompt[sender != receiver :]
    pair.assert_free()


def test_a_prefix_that_was_computed_here_is_found_and_may_be_evicted(folder: Path, expected: list[list[int]]) -> None:
    pair = LoopPair(folder, sharing=True)
    for name, cached in (("cold", 0), ("warm", 32)):
        reservation = pair.decode.prepare(name, spec_of(PROMPTS[3]), OUTPUT, 1)
        assert reservation.matched_tokens == cached
        pair.start(name, reservation, OUTPUT)
        pair.run_decode()
        assert pair.tokens(name) == expected[3]
    pair.caches[1].clear_prefixes()
    assert pair.complete("pushed", PROMPTS[3], OUTPUT) == expected[3]


def test_a_prefix_is_shared_as_soon_as_its_prompt_is_computed(folder: Path) -> None:
    pair = LoopPair(folder, sharing=True)
    ask(pair, "first", PROMPTS[3], (1, 1))
    while not pair.decode.num_running:
        assert pair.decode.prepare("early", spec_of(PROMPTS[3]), OUTPUT, 1).matched_tokens == 0
        pair.decode.abort("early", writer_quiet=True)
        pair.step_decode()
    assert pair.decode.prepare("second", spec_of(PROMPTS[3]), OUTPUT, 1).matched_tokens == 32


def test_workers_that_wait_for_each_other_have_room_for_a_prompt(folder: Path) -> None:
    """Else each holds all its pages for prompts that the other has no page to compute."""
    pair, prompt = LoopPair(folder, num_pages=40), PROMPTS[4]  # 32 are for the longest prompt

    def reserve(name: str, sender: int, receiver: int) -> None:
        pair.loops[receiver].decodes.prepare(name, spec_of(prompt), OUTPUT, sender)

    for number in range(6):
        reserve(f"up {number}", 0, 1)
    with pytest.raises(NoRoom, match="no room"):
        reserve("up", 0, 1)
    reserve("down 0", 1, 0)
    with pytest.raises(NoRoom, match="for a prompt of a peer"):
        reserve("down", 1, 0)
    reserve("its own", 0, 0)  # waits for nobody


def test_a_prompt_of_a_peer_that_waits_for_room_is_not_overtaken(folder: Path) -> None:
    pair = LoopPair(folder, num_pages=12)
    held = pair.loops[0].decodes.prepare("held", spec_of(PROMPTS[4]), 24, 0)  # 8 pages of the worker that is to compute
    waits = ask(pair, "waits", PROMPTS[7], (0, 1))
    pair.step_prefill()
    with pytest.raises(NoRoom, match="prompts of peers wait"):
        pair.loops[0].decodes.prepare("later", spec_of(PROMPTS[0]), OUTPUT, 0)
    assert pair.loops[0].decodes.prepare("held", spec_of(PROMPTS[4]), 24, 0) == held
    pair.loops[0].abort("held", True)
    pair.run_prefill()
    pair.run_decode()
    assert pair.fanout.ended[id(waits)] == FinishReason.LENGTH
    pair.loops[0].decodes.prepare("later", spec_of(PROMPTS[0]), OUTPUT, 0)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_an_abort_at_any_step_frees_all(folder: Path, expected: list[list[int]], steps: int) -> None:
    pair = LoopPair(folder)
    gone, kept = ask(pair, "gone", PROMPTS[7], (1, 1)), ask(pair, "kept", PROMPTS[4], (1, 1))
    for _ in range(steps):
        pair.step_decode()
    assert all(answer.done() for answer in pair.loops[1].abort("gone", False))
    assert pair.fanout.ended[id(gone)] == FinishReason.ABORT
    pair.run_decode()
    assert pair.fanout.tokens[id(kept)] == expected[4]
    pair.assert_free()


def test_a_push_that_is_not_quiet_holds_up_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = LoopPair(folder, verify=False)
    row = ask(pair, "row", PROMPTS[0], (0, 0), output=40)
    while not pair.fanout.tokens.get(id(row)):
        pair.step_prefill()
    waited = list[object]()
    monkeypatch.setattr(Handoff, "await_quiet", lambda self, prompts: waited.append(prompts))
    pair.fabric.hold(1)
    ask(pair, "pushed", PROMPTS[3], (0, 1))
    before = len(pair.fanout.tokens[id(row)])
    for _ in range(10):
        pair.step_prefill()
    assert pair.prefill.num_running  # its writes are under way
    assert len(pair.fanout.tokens[id(row)]) == before + 10
    assert not waited
    pair.fabric.release(1)


def test_a_prompt_is_queued_until_its_first_forward(folder: Path) -> None:
    pair = LoopPair(folder, num_pages=64)
    for name in ("first", "second"):
        ask(pair, name, PROMPTS[7], (1, 1))
    first, second = pair.decode._local._prompts.values()
    pair.step_decode()
    assert first.started >= first.arrived
    assert second.started == 0.0
    while not second.started:
        pair.step_decode()
    assert first.computed == len(PROMPTS[7])


def step_until_decoding(pair: LoopPair, stream: TokenStream) -> None:
    while not pair.fanout.tokens.get(id(stream)):
        pair.step_decode()


def test_rows_and_chunks_share_a_forward(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LoopPair(folder, num_pages=64)
    row = ask(pair, "row", PROMPTS[0], (1, 1))
    step_until_decoding(pair, row)
    runner, joint = pair.runners[1], list[int]()
    together = runner.step_with_prompts

    def noted(sequences: tuple[int, ...], *rest: Any) -> Any:
        joint.append(len(sequences))
        return together(sequences, *rest)

    monkeypatch.setattr(runner, "step_with_prompts", noted)
    own, pushed = ask(pair, "own", PROMPTS[3], (1, 1)), ask(pair, "pushed", PROMPTS[2], (1, 0))
    for _ in range(20):
        step_both(pair)
    assert joint[:2] == [1, 1]  # one row beside two chunks
    assert pair.fanout.tokens[id(row)] == expected[0]
    assert pair.fanout.tokens[id(own)] == expected[3]
    assert pair.fanout.tokens[id(pushed)] == expected[2][1:]
    pair.assert_free()


def test_a_shared_forward_that_fails_fails_those_in_it(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LoopPair(folder, num_pages=64)
    row = ask(pair, "row", PROMPTS[0], (1, 1))
    step_until_decoding(pair, row)
    with monkeypatch.context() as patch:
        patch.setattr(pair.runners[1], "step_with_prompts", MagicMock(side_effect=RuntimeError("no luck")))
        own, later = ask(pair, "own", PROMPTS[7], (1, 1)), ask(pair, "later", PROMPTS[4], (1, 1))
        pair.step_decode()
    assert str(pair.fanout.ended[id(row)]) == "decode of 'row' failed: no luck"
    assert str(pair.fanout.ended[id(own)]) == "prefill of 'own' failed: no luck"
    assert id(later) not in pair.fanout.ended  # no room in the batch, so not in the forward
    pair.run_decode()
    assert pair.fanout.tokens[id(later)] == expected[4]
    pair.assert_free()


def test_rows_go_on_when_chunks_fail_before_the_forward(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LoopPair(folder, num_pages=64)
    row = ask(pair, "row", PROMPTS[0], (1, 1))
    step_until_decoding(pair, row)
    with monkeypatch.context() as patch:
        patch.setattr(PromptForwards, "launch", MagicMock(side_effect=RuntimeError("no luck")))
        own = ask(pair, "own", PROMPTS[7], (1, 1))
        pair.step_decode()
    assert str(pair.fanout.ended[id(own)]) == "prefill of 'own' failed: no luck"
    pair.run_decode()
    assert pair.fanout.tokens[id(row)] == expected[0]
    pair.assert_free()
