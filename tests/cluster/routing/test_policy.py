"""Routing policies: pure functions, so they need neither workers nor gRPC."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.routing.policy import POLICIES, Ask, Pair, WorkerLoad, least_loaded
from tandem.workers.config import Role


def workers_of(loads: list[tuple[int, Role, int, bool]]) -> list[WorkerLoad]:
    return [
        WorkerLoad(f"i{island}", pe, role, load, reachable)
        for pe, (island, role, load, reachable) in enumerate(sorted(loads))
    ]


LOADS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Role), st.integers(0, 9), st.booleans())).map(workers_of)


def of_role(workers: list[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [one for one in workers if one.role == role and one.reachable]


@pytest.mark.parametrize("name", POLICIES)
@given(workers=LOADS, turn=st.integers(0, 20))
def test_every_policy_pairs_reachable_workers_of_one_island(name: str, workers: list[WorkerLoad], turn: int) -> None:
    pairs: list[Pair] = POLICIES[name](workers, Ask(1, 1), turn)
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
    pairs = least_loaded(workers, Ask(1, 1), 0)
    assert [pair.decode.load for pair in pairs] == sorted(pair.decode.load for pair in pairs)
    for _, prefill, _ in pairs:
        rivals = [one.load for one in of_role(workers, Role.PREFILL) if one.island == prefill.island]
        assert prefill.load == min(rivals)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.routing_policy is 'random'; it must be least_loaded"):
        load_config(None, {"gateway.routing_policy": "random"})
