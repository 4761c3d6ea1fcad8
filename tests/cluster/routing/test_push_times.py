"""Pushes between hosts count in the choice of a pair."""

import pytest

from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.policy import Ask, Policy, WorkerLoad, least_loaded, prefix_aware
from tandem.cluster.routing.push_times import FRESH_SECONDS, HALF_SECONDS, MOST_PAIRS, PushTimes
from tandem.workers.config import Role

RATE = 1000.0  # prompt tokens a second


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def seen(clock: Clock, *pushes: tuple[str, str, int, float]) -> PushTimes:
    times = PushTimes(clock)
    for prefill, decode, tokens, seconds in pushes:
        times.saw((prefill, decode), tokens, seconds)
    clock.now += FRESH_SECONDS
    return times


def worker(pe: int, role: Role, host: str, load: int = 0) -> WorkerLoad:
    waiting = load if role == Role.PREFILL else 0
    return WorkerLoad("i", pe, role, load, True, waiting, prompt_rate=RATE, host=host)


class TestTimes:
    def test_a_token_takes_what_pushes_took_together(self, clock: Clock) -> None:
        times = seen(clock, ("a", "b", 100, 1.0), ("a", "b", 300, 1.0), ("b", "a", 50, 5.0))
        known = times.per_token
        assert known["a", "b"] == pytest.approx(1.9 / 390, rel=0.05)
        assert known["b", "a"] == pytest.approx(0.1, rel=0.05)

    def test_workers_of_one_host_and_empty_pushes_count_as_nothing(self, clock: Clock) -> None:
        assert not seen(clock, ("a", "a", 100, 9.0), ("a", "b", 0, 9.0)).per_token

    def test_what_was_slow_once_is_tried_again(self, clock: Clock) -> None:
        times = seen(clock, ("a", "b", 100, 10.0))
        first = times.per_token["a", "b"]
        clock.now += 10 * HALF_SECONDS
        assert times.per_token["a", "b"] < first / 1000

    def test_hosts_that_come_and_go_do_not_add_up(self, clock: Clock) -> None:
        times = seen(clock, *((f"{number}", "b", 1, 1.0) for number in range(MOST_PAIRS + 5)))
        assert len(times.per_token) == MOST_PAIRS


@pytest.mark.parametrize("policy", [least_loaded, prefix_aware, adaptive(0.25)])
def test_the_prefill_worker_on_the_decode_workers_host_is_taken_while_the_link_costs_more_than_its_queue(
    policy: Policy,
) -> None:
    """The far one has nothing to do, the near one has 100 tokens to compute before."""
    decode = worker(2, Role.DECODE, "a")
    workers = [worker(0, Role.PREFILL, "a", 100), worker(1, Role.PREFILL, "b"), decode]
    for seconds, chosen in ((0.0, 1), (0.0009, 1), (0.0011, 0), (1.0, 0)):
        ask = Ask(100, 1, pushes={("b", "a"): seconds})
        best = next(pair for pair in policy(workers, ask, 0) if pair.decode is decode and pair.prefill is not decode)
        assert best.prefill.pe == chosen, seconds


def test_a_decode_worker_that_holds_the_prompt_gets_little_of_it_over_the_link() -> None:
    decode, far = worker(2, Role.DECODE, "a"), worker(1, Role.PREFILL, "b")
    pushes = {("b", "a"): 0.01}
    assert Ask(100, 1, {}, pushes).push_seconds(far, decode) == pytest.approx(1.0)
    assert Ask(100, 1, {decode.key: 90}, pushes).push_seconds(far, decode) == pytest.approx(0.1)


@pytest.mark.parametrize("policy", [least_loaded, prefix_aware])
def test_of_two_decode_workers_the_one_beside_the_prefill_worker_comes_first(policy: Policy) -> None:
    workers = [worker(0, Role.PREFILL, "a"), worker(1, Role.DECODE, "b"), worker(2, Role.DECODE, "a", 50)]
    order = [pair.decode.pe for pair in policy(workers, Ask(100, 1, pushes={("a", "b"): 0.001}), 0)]
    assert order == [2, 1]
