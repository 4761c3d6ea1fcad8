"""Islands whose workers are on two hosts: joined by NIXL, or with ranks, which share a host."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.host_cluster import ANSWER, OVER_HOSTS, running
from tests.support.hosts import NODE_CPUS, can_make_hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = [pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`"), pytest.mark.long]
WITH_NIXL = pytest.mark.skipif(
    find_spec("nixl") is None, reason="nixl is not installed; pip install 'tandem-serve[nixl]'"
)


@pytest.mark.timeout(400)  # with the start of all
@pytest.mark.parametrize(
    ("settings", "second_cpus"),
    [
        pytest.param({"island.transport": "nixl"}, NODE_CPUS, id="nixl", marks=WITH_NIXL),
        pytest.param({"island.decode_ranks": 2}, NODE_CPUS + 1, id="ranks"),
    ],
)
def test_tokens_over_two_hosts_are_those_of_transformers(
    settings: dict[str, object], second_cpus: int, small_model: Path, tmp_path: Path
) -> None:
    prompts = [random_prompt(5 + 37 * number, number) for number in range(8)]
    expected = greedy_all(load_oracle(small_model), prompts, ANSWER)
    with hosts(4) as made:
        made.start_ray(0, cpus=NODE_CPUS + 1)
        made.start_ray(1, cpus=second_cpus)
        with running(made, tmp_path, small_model, OVER_HOSTS | settings) as cluster:
            ((there, workers),) = cluster.islands().values()
            assert sorted(there.split(", ")) == sorted(made.addresses[:2])
            assert len(workers) == 2
            assert cluster.answers(tmp_path, prompts) == expected
