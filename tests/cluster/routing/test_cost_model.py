"""Roles by load: pure functions, so they need neither workers nor gRPC."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.policy import Ask, WorkerLoad
from tandem.cluster.routing.rebalance import FASTER, MOST_A_MOVE, moves
from tandem.workers.config import Role

BOUND = 0.015
POLICY = adaptive(BOUND)
ASK = Ask(1000, 256)
RATE = 40_000.0


def worker(pe: int, role: Role, **figures: Any) -> WorkerLoad:
    return WorkerLoad("i", pe, role, 0, True)._replace(prompt_rate=RATE, **figures)


def best(workers: Sequence[WorkerLoad], ask: Ask = ASK) -> tuple[int, int]:
    pair = next(POLICY(workers, ask, 0))
    return pair.decode.pe, pair.prefill.pe


def test_parked_requests_make_a_worker_dearer() -> None:
    """They have rows again before the new one ends."""
    busy = {"rows": 8, "token_seconds": 0.01}
    loads = [worker(0, Role.PREFILL), *(worker(pe, Role.DECODE, **busy) for pe in (1, 2))]
    for full, other in ((1, 2), (2, 1)):
        parked = [one._replace(parked=8 * (one.pe == full)) for one in loads]
        assert best(parked) == (other, 0)


LOADS = st.lists(
    st.builds(
        WorkerLoad,
        island=st.sampled_from(["i0", "i1"]),
        pe=st.integers(0, 9),
        role=st.sampled_from(Role),
        load=st.integers(0, 10**6),
        reachable=st.booleans(),
        prompt_tokens=st.integers(0, 10**6),
        rows=st.integers(0, 512),
        token_seconds=st.floats(0, 1),
        prompt_rate=st.floats(0, 1e6),
    ),
    unique_by=lambda one: one.key,
)
PUSHES = st.dictionaries(st.just(("", "")), st.floats(0, 1), max_size=1)
ASKS = st.builds(Ask, st.integers(1, 10**5), st.integers(1, 10**5), matches=st.just({}), pushes=PUSHES)


@given(workers=LOADS, ask=ASKS)
def test_colocated_workers_compute_what_they_decode(workers: list[WorkerLoad], ask: Ask) -> None:
    pairs = list(adaptive(BOUND, colocated=True)(workers, ask, 0))
    assert all(decode == prefill and seconds > 0 for decode, prefill, seconds in pairs)
    reachable = sorted(one.key for one in workers if one.reachable)
    assert sorted(pair.decode.key for pair in pairs) == reachable


def test_colocated_workers_take_turns_by_load() -> None:
    """The role that a worker is mainly for does not count."""
    policy = adaptive(BOUND, colocated=True)
    for busy, idle in ((0, 1), (1, 0)):
        loads = [worker(0, Role.PREFILL), worker(1, Role.DECODE)]
        loads[busy] = loads[busy]._replace(prompt_tokens=4000, rows=8, token_seconds=0.01)
        assert next(policy(loads, ASK, 0)).decode.pe == idle


@given(workers=LOADS, ask=ASKS)
def test_each_reachable_worker_may_decode_and_none_else(workers: list[WorkerLoad], ask: Ask) -> None:
    pairs = list(POLICY(workers, ask, 0))
    for decode, prefill, seconds in pairs:
        assert decode.reachable
        assert prefill.reachable
        assert decode.island == prefill.island
        assert seconds > 0
    reachable = {one.key for one in workers if one.reachable}
    assert {pair.decode.key for pair in pairs} == reachable
    assert len({(pair.decode.key, pair.prefill.key) for pair in pairs}) == len(pairs)


def test_roles_are_split_while_both_sides_have_time() -> None:
    workers = [worker(0, Role.PREFILL), worker(1, Role.DECODE, rows=40, token_seconds=0.007)]
    assert best(workers) == (1, 0)


def test_an_idle_island_splits_its_roles() -> None:
    assert best([worker(0, Role.PREFILL), worker(1, Role.DECODE)]) == (1, 0)


def test_a_decode_worker_takes_prompts_from_a_busy_prefill_worker() -> None:
    workers = [worker(0, Role.PREFILL, prompt_tokens=30_000), worker(1, Role.DECODE, rows=40, token_seconds=0.007)]
    assert best(workers) == (1, 1)


def test_a_decode_worker_at_its_bound_takes_no_prompts() -> None:
    workers = [worker(0, Role.PREFILL, prompt_tokens=4000), worker(1, Role.DECODE, rows=90, token_seconds=BOUND)]
    assert best(workers)[1] == 0


def test_an_idle_prefill_worker_keeps_requests_of_a_slow_decode_worker() -> None:
    workers = [worker(0, Role.PREFILL), worker(1, Role.DECODE, rows=300, token_seconds=0.02)]
    assert best(workers) == (0, 0)


def test_a_prefix_counts_where_it_lies() -> None:
    workers = [worker(0, Role.PREFILL, prompt_tokens=2000), worker(1, Role.DECODE, rows=8, token_seconds=0.005)]
    assert best(workers, Ask(16_000, 64)) == (1, 0)
    assert best(workers, Ask(16_000, 64, {("i", 1): 15_900})) == (1, 1)


@given(workers=LOADS, bound=st.floats(0.001, 1))
def test_moves_go_from_slow_workers_to_faster_ones_of_their_island(workers: list[WorkerLoad], bound: float) -> None:
    found = moves(workers, bound)
    assert len({move.source.island for move in found}) == len(found)
    for source, target, count in found:
        assert source.island == target.island
        assert source.key != target.key
        assert target.reachable
        assert source.token_seconds > bound
        assert not target.prompt_tokens
        assert not target.rows or target.token_seconds <= FASTER * source.token_seconds
        assert 1 <= count <= min(MOST_A_MOVE, source.rows)


def test_nothing_moves_within_the_bound() -> None:
    assert not moves([worker(0, Role.PREFILL), worker(1, Role.DECODE, rows=9, token_seconds=BOUND)], BOUND)


@pytest.mark.parametrize("figures", [{"prompt_tokens": 1}, {"rows": 9, "token_seconds": 0.019}])
def test_nothing_moves_to_a_worker_that_is_not_faster(figures: dict[str, float]) -> None:
    slow = worker(1, Role.DECODE, rows=9, token_seconds=0.02)
    assert moves([worker(0, Role.PREFILL), slow], BOUND)
    assert not moves([worker(0, Role.PREFILL, **figures), slow], BOUND)
