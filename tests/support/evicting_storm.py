"""Prompts that begin alike and evict one another: in a cluster, against transformers, and replayed from records."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cluster.cli.replayed_workers import replay_files
from tests.e2e.test_state_snapshots import workers_of
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import Island, running_island
from tests.support.oracle import greedy_all, load_oracle, random_prompt

OUTPUT = 6
SETTINGS: dict[str, Any] = {
    "cache.num_pages": 40,
    "cache.host_bytes": 64 << 20,
    "cache.verify_host": True,
    "cache.state_interval": 16,
    "cache.state_share": 0.6,
    "scheduler.max_sequences": 3,
}


def storm_prompts(count: int) -> list[list[int]]:
    """Makes prompts with five beginnings."""
    begins = [random_prompt(60, number) for number in range(5)]
    return [begins[number % 5][: 30 + number % 31] + random_prompt(20, number) for number in range(count)]


def check_storm(
    model: Path, records: Path, settings: dict[str, Any], check_idle: Callable[[Island], None], count: int = 25
) -> None:
    """Sends the same prompts twice, at the same time. Some come back from host memory, none is bad there, and replays
    find equal pages and counts. records: a folder for them. settings: added to SETTINGS."""
    prompts = storm_prompts(count)
    due = greedy_all(load_oracle(model), prompts, OUTPUT)
    recorded = {"record.folder": str(records), "record.prompts": True}
    with running_island(model, SETTINGS | settings | recorded) as island:
        for _ in range(2):
            assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == due
        check_idle(island)
        workers = workers_of(island)
    assert sum(one.counters.host_hits for one in workers)
    assert not sum(one.counters.host_bad_pages for one in workers)
    summary = replay_files(sorted(records.glob("*.tandemrec")))
    assert summary.difference is None
    assert summary.prefix_hits
