"""Routing policies: pure functions, so they need neither workers nor gRPC."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.routing.policy import POLICIES, SAVED_WORTH, Ask, Key, WorkerLoad, least_loaded, prefix_aware
from tandem.workers.config import Role


def workers_of(loads: list[tuple[int, Role, int, bool]]) -> list[WorkerLoad]:
    return [
        WorkerLoad(f"i{island}", pe, role, load, reachable)
        for pe, (island, role, load, reachable) in enumerate(sorted(loads))
    ]


LOADS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Role), st.integers(0, 9), st.booleans())).map(workers_of)


MATCHES = st.dictionaries(st.tuples(st.sampled_from(["i0", "i1", "i2", "gone"]), st.integers(0, 9)), st.integers(0, 99))


def of_role(workers: list[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [one for one in workers if one.role == role and one.reachable]


@pytest.mark.parametrize("name", POLICIES)
@given(workers=LOADS, turn=st.integers(0, 20), matches=MATCHES)
def test_every_policy_pairs_reachable_workers_of_one_island(
    name: str, workers: list[WorkerLoad], turn: int, matches: dict[Key, int]
) -> None:
    pairs = list(POLICIES[name](workers, Ask(100, 1, matches), turn))
    assert list(POLICIES[name](workers, Ask(100, 1, matches), turn)) == pairs
    for decode, prefill, _ in pairs:
        assert (decode.role, prefill.role) == (Role.DECODE, Role.PREFILL)
        assert decode.reachable
        assert prefill.reachable
        assert decode.island == prefill.island
    # No decode worker with room may be overlooked, and none is asked twice.
    islands = {one.island for one in of_role(workers, Role.PREFILL)}
    served = [one for one in of_role(workers, Role.DECODE) if one.island in islands]
    assert sorted(pair.decode for pair in pairs) == sorted(served)


@given(workers=LOADS)
def test_least_loaded_puts_the_least_load_first(workers: list[WorkerLoad]) -> None:
    pairs = list(least_loaded(workers, Ask(1, 1), 0))
    assert [pair.decode.load for pair in pairs] == sorted(pair.decode.load for pair in pairs)
    for _, prefill, _ in pairs:
        rivals = [one.load for one in of_role(workers, Role.PREFILL) if one.island == prefill.island]
        assert prefill.load == min(rivals)


def one_island(loads: list[int], prompts: list[int]) -> list[WorkerLoad]:
    """Decode workers with these loads, from PE 0 on, and prefill workers with these tokens to compute."""
    decodes = [WorkerLoad("i", pe, Role.DECODE, load, True) for pe, load in enumerate(loads)]
    prefills = [
        WorkerLoad("i", pe, Role.PREFILL, tokens, True, prompt_tokens=tokens)
        for pe, tokens in enumerate(prompts, start=len(loads))
    ]
    return [*decodes, *prefills]


LOAD = st.integers(0, 10_000)


@given(loads=st.lists(LOAD, min_size=1, max_size=5), prompts=st.lists(LOAD, min_size=1, max_size=5))
def test_without_matches_prefix_aware_is_least_loaded(loads: list[int], prompts: list[int]) -> None:
    workers = one_island(loads, prompts)
    assert list(prefix_aware(workers, Ask(500, 10), 0)) == list(least_loaded(workers, Ask(500, 10), 0))


@given(loads=st.lists(LOAD, min_size=2, max_size=5), prompts=st.lists(LOAD, min_size=2, max_size=5), held=LOAD)
def test_a_match_outweighs_a_bounded_load_on_both_sides(loads: list[int], prompts: list[int], held: int) -> None:
    workers = one_island(loads, prompts)
    holders = {("i", 0): held, ("i", len(loads)): held}
    decode, prefill, _ = next(prefix_aware(workers, Ask(held + 1, 10, holders), 0))
    if loads[0] - held < min(loads[1:]):
        assert decode.pe == 0
    if prompts[0] - SAVED_WORTH * held < min(prompts[1:]):
        assert prefill.pe == len(loads)
    assert decode.load - min(loads) <= held  # a prefix that everybody sends drowns nobody
    assert prefill.prompt_tokens - min(prompts) <= SAVED_WORTH * held


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"gateway\.routing_policy is 'random'; it must be least_loaded or prefix_aware"
    ):
        load_config(None, {"gateway.routing_policy": "random"})
