"""An island whose prefill and decode worker are processes on two hosts, which NIXL joins."""

from pathlib import Path

import pytest

from tests.e2e.host_cluster import ANSWER, OVER_HOSTS, running
from tests.support.hosts import NODE_CPUS, can_make_hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytest.importorskip("nixl", reason="nixl is not installed; pip install -e '.[nixl]'")
pytestmark = [pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`"), pytest.mark.long]


@pytest.mark.timeout(400)  # with the start of all
def test_tokens_over_two_hosts_are_those_of_transformers(small_model: Path, tmp_path: Path) -> None:
    prompts = [random_prompt(5 + 37 * number, number) for number in range(8)]
    expected = greedy_all(load_oracle(small_model), prompts, ANSWER)
    with hosts(4) as made:
        made.start_ray(0, cpus=NODE_CPUS + 1)
        made.start_ray(1)
        with running(made, tmp_path, small_model, OVER_HOSTS | {"island.transport": "nixl"}) as cluster:
            ((_, workers),) = cluster.islands().values()
            assert [worker.rpartition(":")[0] for worker in workers] == made.addresses[:2]
            assert cluster.answers(tmp_path, prompts) == expected
