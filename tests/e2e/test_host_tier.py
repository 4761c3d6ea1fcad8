"""Prompts that evict one another come back from host memory: in a cluster, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.cache.store.copies import PageCopies
from tandem.cache.store.host_store import HostStore
from tandem.cluster.cli.replayed_workers import replay_files
from tandem.cluster.client.client_messages import Usage
from tandem.cluster.metrics.cluster_series import worker_families
from tests.e2e.test_ranks import is_idle
from tests.e2e.test_state_snapshots import cached_of, workers_of
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.encoder_models import greedy_behind, save_t5gemma
from tests.support.evicting_storm import check_storm
from tests.support.http_client import COMPLETIONS, answer
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

OUTPUT = 6
FEW: dict[str, Any] = {"cache.num_pages": 20, "cache.host_bytes": 4 << 20, "cache.verify_host": True}
"""Settings with pages for one prompt of PROMPTS and its output, and host memory for all prompts."""
PROMPTS = [random_prompt(97 + number, number) for number in range(4)]


@pytest.fixture(autouse=True)
def _every_hit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses every hit: a busy machine may measure any rate."""
    monkeypatch.setattr(PageCopies, "rate", 0.0)


def usage_of(island: Island, prompt: list[int]) -> Usage:
    usage = complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)[-1].usage
    assert usage is not None
    return usage


def spoil(island: Island) -> None:
    """Flips one bit of each page in the host memory of the prefill worker."""
    worker = island.workers[0]

    def change() -> None:
        store = worker.cache._pools.prefixes.store
        assert isinstance(store, HostStore)
        store.memory.shelves[0][:, 29] ^= 1

    worker.on_step_thread(change)


def test_prompts_that_evict_one_another_come_back(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    expected = greedy_all(load_oracle(folder), PROMPTS, OUTPUT)
    with running_island(folder, FEW) as island:
        both = list(zip(PROMPTS, expected, strict=True))
        assert [cached_of(island, *one) for one in both] == [0] * 4
        assert [cached_of(island, *one) for one in both] == [96] * 4
        assert (evicted := usage_of(island, PROMPTS[0])).host_cached_tokens == evicted.cached_tokens == 96
        assert (again := usage_of(island, PROMPTS[0])).host_cached_tokens < again.cached_tokens == 96
        assert cached_of(island, *both[0], salt="mine") == 0
        for worker in workers_of(island):
            counters = worker.counters
            assert counters.host_hits >= 3
            assert counters.host_pages_up >= 3 * 8
            assert counters.host_pages_down >= 3 * 12
            assert counters.host_bad_pages == 0
            assert 0 < worker.host_bytes_used <= worker.host_bytes <= 4 << 20
        spoil(island)
        assert cached_of(island, *both[1]) < 96
        assert workers_of(island)[0].counters.host_bad_pages > 0
        assert workers_of(island)[1].counters.host_bad_pages == 0
        until(lambda: is_idle(island))
        with island.client() as client:
            samples = {one.name: one.samples for one in worker_families(client.cluster_info().islands)}
        assert samples["tandem:worker_host_hits"][0].value >= 3
        assert samples["tandem:worker_host_bytes_used"][0].value > 0


def test_usage_over_http_names_the_tier(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    with running_island(folder, FEW | {"gateway.http_port": 0}) as island:
        found = []
        for prompt in (*PROMPTS[:2], *PROMPTS[:2], PROMPTS[1]):
            usage = answer(island.http, COMPLETIONS, prompt=prompt, max_tokens=2, temperature=0)["usage"]
            found.append((usage["prompt_tokens_details"]["cached_tokens"], usage.get("x-tandem")))
    assert found[:2] == [(0, None)] * 2
    assert found[2][0] == 96
    assert 0 < found[2][1]["host_cached_tokens"] <= 96
    assert found[4] == (96, None)


def test_prompts_go_to_the_worker_whose_host_memory_has_them(tmp_path: Path) -> None:
    """Two workers compute prompts, each with pages for one: the worker with less to do would compute half of them."""
    folder = save_checkpoint("llama", tmp_path)
    prompts = [random_prompt(97, number) for number in range(6)]
    both = list(zip(prompts, greedy_all(load_oracle(folder), prompts, OUTPUT), strict=True))
    settings = {"island.num_prefill": 2, "gateway.routing_policy": "prefix_aware"}
    with running_island(folder, FEW | settings) as island:
        assert [cached_of(island, *one) for one in both] == [0] * 6
        islands = island.gateway._islands
        keys = [islands.prompt_keys(np.array(prompt), b"") for prompt in prompts]
        until(lambda: all(max(islands._prefixes.match(each).values(), default=0) == 96 for each in keys))
        assert [cached_of(island, *one) for one in both[::-1]] == [96] * 6
        until(lambda: is_idle(island))


def test_what_takes_longer_than_computing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker decides by its rates: of its copies, which are set here, and of its prompts. A replay does the same."""
    folder = save_checkpoint("llama", tmp_path / "model")
    prompts = [random_prompt(200 + number, number) for number in range(3)]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    both = list(zip(prompts, expected, strict=True))
    few = {**FEW, "cache.num_pages": 30, "record.folder": str(tmp_path / "records"), "record.prompts": True}
    with running_island(folder, few) as island:
        prefill = workers_of(island)[0]
        assert [cached_of(island, *one) for one in both] == [0] * 3
        monkeypatch.setattr(PageCopies, "rate", 1.0)
        assert [cached_of(island, *one) for one in both] == [0] * 3
        assert prefill.counters.host_hits == 0
        monkeypatch.setattr(PageCopies, "rate", 1e15)
        assert [cached_of(island, *one) for one in both] == [192, 200, 200]
        until(lambda: is_idle(island))
        counters = workers_of(island)[0].counters
    assert counters.host_skipped_hits >= 3
    assert counters.host_hits >= 3
    summary = replay_files(sorted((tmp_path / "records").glob("*.tandemrec")))
    assert summary.difference is None
    assert summary.prefix_hits


@pytest.mark.long
@pytest.mark.parametrize("roles", ["split", "adaptive", "colocated"])
@pytest.mark.parametrize(
    "case", ["qwen3", "gemma3", "deepseek_v3", "deepseek_v4", "gpt_oss", "qwen3_next", "llama4", "nemotron_h"]
)
def test_storms_of_every_kind_of_state(case: str, roles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts run at the same time, with requests that move, and their records are replayed: pages and counts are
    equal."""
    if roles == "adaptive":
        move_back_and_forth(2, monkeypatch)
    folder, settings = save_checkpoint(case, tmp_path / "model"), {"scheduler.roles": roles}
    settings |= {"island.num_prefill": 0} if roles == "colocated" else {}
    check_storm(folder, tmp_path / "records", settings, lambda island: until(lambda: is_idle(island)))


@pytest.mark.long
def test_prompts_of_an_encoder_come_back(tmp_path: Path) -> None:
    """Both its pages and those of the decoder's prompt after them come back, or neither."""
    oracle = save_t5gemma(tmp_path)
    pairs = [(random_prompt(40, number), random_prompt(50, 10 + number)) for number in range(5)]
    expected = [greedy_behind(oracle, encoder, OUTPUT, decoder) for encoder, decoder in pairs]
    with running_island(tmp_path, FEW) as island:
        cached = []
        for _ in range(2):
            for (encoder, decoder), tokens in zip(pairs, expected, strict=True):
                updates = complete(island.address, encoder, decoder_prompt=decoder, max_tokens=OUTPUT, **GREEDY)
                assert tokens_of(updates) == tokens
                assert updates[-1].usage is not None
                cached.append(updates[-1].usage.cached_tokens)
        assert cached == [0] * 5 + [88] * 5
        assert all(one.counters.host_hits for one in workers_of(island))
        until(lambda: is_idle(island))


@pytest.mark.gate("2-1")
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_keep_their_parts(prefill: int, decode: int, tmp_path: Path) -> None:
    """All ranks compute a page again that changed on one rank."""
    folder = save_checkpoint("llama", tmp_path)
    oracle = load_oracle(folder)
    shape = {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    with running_island(folder, FEW | shape) as island:
        for one in [*PROMPTS, *PROMPTS[:2]]:
            assert cached_of(island, one, greedy(oracle, one, OUTPUT)) in (0, 96)
        spoil(island)
        assert cached_of(island, PROMPTS[2], greedy(oracle, PROMPTS[2], OUTPUT)) < 96
        assert cached_of(island, PROMPTS[0], greedy(oracle, PROMPTS[0], OUTPUT)) <= 96
        workers = workers_of(island)
        assert all(one.counters.host_hits for one in workers)
        assert workers[0].counters.host_bad_pages
        until(lambda: is_idle(island))
