"""Prompts that host memory has no room for come back from a disk, also after their worker has ended or was killed: in a
cluster, against transformers."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tandem.cache.store.copies import PageCopies
from tandem.cache.store.disk.disk_pages import DiskPages
from tandem.cache.store.tiered_store import TieredStore
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.metrics.cluster_series import worker_families
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.e2e.test_host_tier import OUTPUT, PROMPTS, usage_of
from tests.e2e.test_ranks import is_idle
from tests.e2e.test_recovery import OVERRIDES, VOCABULARY, info, whole
from tests.e2e.test_state_snapshots import cached_of, workers_of
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.client_requests import GREEDY, complete_all, tokens_of
from tests.support.encoder_models import greedy_behind, save_t5gemma
from tests.support.evicting_storm import SETTINGS, storm_prompts
from tests.support.http_client import COMPLETIONS, answer
from tests.support.island import Island, running_island
from tests.support.local_processes import LocalProcesses
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

KILLS = 6


@pytest.fixture(autouse=True)
def _every_hit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses every hit: a busy machine may measure any rate."""
    monkeypatch.setattr(PageCopies, "rate", 0.0)


def few(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Returns settings with pages for one prompt of PROMPTS and its output, host memory for little more, and a disk for
    all."""
    settings = {"cache.num_pages": 20, "cache.host_bytes": 100_000, "cache.verify_host": True}
    return settings | {"cache.disk_path": str(tmp_path / "disk"), "cache.disk_bytes": 8 << 20} | more


def disks(island: Island) -> list[DiskPages]:
    found = []
    for worker in island.workers:
        store = worker.cache.page_store
        assert isinstance(store, TieredStore)
        found.append(store.disk)
    return found


def settle(island: Island) -> None:
    """Waits until everything in host memory is on the disk."""
    until(lambda: is_idle(island))
    for worker, disk in zip(island.workers, disks(island), strict=True):
        worker.on_step_thread(worker.cache.tend)
        assert disk.settle(30)


def test_prompts_that_evict_one_another_come_back_from_the_disk(tmp_path: Path) -> None:
    """An island and the next one with the same weights share them; an island of other weights finds none."""
    folder = save_checkpoint("llama", tmp_path / "model")
    both = list(zip(PROMPTS, greedy_all(load_oracle(folder), PROMPTS, OUTPUT), strict=True))
    with running_island(folder, few(tmp_path, **{"gateway.http_port": 0})) as island:
        for found in (0, 96):
            for one in both:
                assert cached_of(island, *one) == found
                settle(island)
        assert cached_of(island, *both[0], salt="mine") == 0
        settle(island)
        usage = usage_of(island, PROMPTS[1])
        assert 0 < usage.disk_cached_tokens <= usage.host_cached_tokens == usage.cached_tokens == 96
        usage = answer(island.http, COMPLETIONS, prompt=PROMPTS[3], max_tokens=2, temperature=0)["usage"]
        assert usage["x-tandem"]["disk_cached_tokens"] > 0
        until(lambda: is_idle(island))
        for worker in workers_of(island):
            counters = worker.counters
            assert counters.disk_pages_up >= 3 * 8
            assert counters.disk_pages_down >= 4 * 12
            assert (counters.disk_bad_pages, counters.disk_errors, counters.disk_adopted_pages) == (0, 0, 0)
            assert 0 < worker.disk_bytes_used <= worker.disk_bytes <= 8 << 20
        with island.client() as client:
            samples = {one.name: one.samples for one in worker_families(client.cluster_info().islands)}
        assert samples["tandem:worker_disk_bytes_used"][0].value > 0
    with running_island(folder, few(tmp_path)) as island:
        assert all(disk.settle(30) for disk in disks(island))
        assert [cached_of(island, *one) for one in both] == [96] * 4
        assert all(worker.counters.disk_adopted_pages >= 48 for worker in workers_of(island))
    other = tmp_path / "other"
    make_model("llama", seed=7).save_pretrained(other)
    with running_island(other, few(tmp_path)) as island:
        assert all(disk.settle(30) for disk in disks(island))
        expected = greedy_all(load_oracle(other), PROMPTS, OUTPUT)
        assert [cached_of(island, *one) for one in zip(PROMPTS, expected, strict=True)] == [0] * 4
        assert not any(worker.counters.disk_adopted_pages for worker in workers_of(island))


@pytest.mark.long
def test_prompts_that_are_read_come_back_from_the_disk(tmp_path: Path) -> None:
    """They are prompts of embeddings, which no worker decodes."""
    folder = save_checkpoint("llama", tmp_path / "model")
    with running_island(folder, few(tmp_path)) as island, island.client() as client:
        before = []
        for prompt in PROMPTS:
            before.append(client.embed(prompt).values)
            settle(island)
        found = client.embed(PROMPTS[0])
    usage = found.usage
    assert 0 < usage.disk_cached_tokens <= usage.host_cached_tokens == usage.cached_tokens == 96
    assert found.values == pytest.approx(before[0], abs=1e-5)


def test_what_takes_longer_to_read_than_to_compute_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint("llama", tmp_path / "model")
    prompts = [random_prompt(200 + number, number) for number in range(4)]
    both = list(zip(prompts, greedy_all(load_oracle(folder), prompts, OUTPUT), strict=True))
    with running_island(folder, few(tmp_path, **{"cache.num_pages": 30, "cache.host_bytes": 150_000})) as island:
        for one in both:
            assert cached_of(island, *one) == 0
            settle(island)
        monkeypatch.setattr(PageCopies, "rate", 1e15)
        monkeypatch.setattr(DiskPages, "rate", 1.0)
        assert cached_of(island, *both[0]) == 0
        settle(island)
        assert workers_of(island)[0].counters.disk_skipped_hits
        monkeypatch.setattr(DiskPages, "rate", 1e15)
        assert cached_of(island, *both[1]) == 200


@pytest.mark.gate("2-1")
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2)])
def test_ranks_read_their_parts(prefill: int, decode: int, tmp_path: Path) -> None:
    """All ranks compute a page again that one rank's disk has lost."""
    folder = save_checkpoint("llama", tmp_path / "model")
    oracle = load_oracle(folder)
    shape = {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    both = [(prompt, greedy(oracle, prompt, OUTPUT)) for prompt in PROMPTS]
    with running_island(folder, few(tmp_path, **shape)) as island:
        for one in both:
            assert cached_of(island, *one) == 0
            until(lambda: is_idle(island))
            time.sleep(0.1)  # followers hand pages to their disks between calls
        assert all(disk.settle(30) for disk in disks(island))
        assert cached_of(island, *both[0]) == 96
        until(lambda: is_idle(island))
        lost = disks(island)[prefill - 1]
        with lost._changed:
            lost._entries[0].clear()
        assert cached_of(island, *both[1]) == 0
        until(lambda: is_idle(island))
    with running_island(folder, few(tmp_path, **shape)) as island:
        assert all(disk.settle(30) for disk in disks(island))
        assert cached_of(island, *both[0]) == 96
        until(lambda: is_idle(island))


@pytest.mark.long
@pytest.mark.parametrize("roles", ["split", "adaptive", "colocated"])
@pytest.mark.parametrize(
    "case", ["qwen3", "gemma3", "deepseek_v3", "deepseek_v4", "gpt_oss", "qwen3_next", "llama4", "nemotron_h", "fp8"]
)
def test_storms_of_every_kind_of_state(case: str, roles: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts run at the same time, with requests that move, and again in the next island."""
    if roles == "adaptive":
        move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint("llama" if case == "fp8" else case, tmp_path / "model")
    prompts = storm_prompts(25)
    settings = few(tmp_path, **SETTINGS, **{"scheduler.roles": roles}) | {"cache.disk_bytes": 64 << 20}
    settings |= {"cache.host_bytes": 1 << 20 if case in ("qwen3_next", "nemotron_h", "deepseek_v4") else 200_000}
    settings |= {"cache.kv_cache_dtype": "fp8_e4m3"} if case == "fp8" else {}
    settings |= {"island.num_prefill": 0} if roles == "colocated" else {}
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT) if case != "fp8" else None
    read = 0
    for _ in range(2):
        with running_island(folder, settings) as island:
            for _ in range(2):
                found = complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY)
                expected = found if expected is None else expected
                assert found == expected
                settle(island)
            for worker, disk in zip(workers_of(island), disks(island), strict=True):
                counts = disk.counts
                assert (counts.bad, counts.failed) == (0, 0)
                assert counts.used <= counts.capacity
                assert worker.counters.host_bad_pages == 0
                read += counts.read
            for worker in island.workers:
                store = worker.cache.page_store
                assert isinstance(store, TieredStore)
                assert not store._lifting
                assert not any(shelf.reserved for shelf in store._shelves)
    assert read


@pytest.mark.long
def test_prompts_of_an_encoder_come_back(tmp_path: Path) -> None:
    oracle = save_t5gemma(tmp_path / "model")
    pairs = [(random_prompt(40, number), random_prompt(50, 10 + number)) for number in range(5)]
    expected = [greedy_behind(oracle, encoder, OUTPUT, decoder) for encoder, decoder in pairs]
    for rounds in ((0, 88), (88,)):
        with running_island(tmp_path / "model", few(tmp_path, **{"cache.host_bytes": 400_000})) as island:
            assert all(disk.settle(30) for disk in disks(island))
            for found, ((encoder, decoder), tokens) in product(rounds, zip(pairs, expected, strict=True)):
                with island.client() as client:
                    updates = list(client.generate(encoder, decoder_prompt=decoder, max_tokens=OUTPUT, **GREEDY))
                assert tokens_of(updates) == tokens
                assert updates[-1].usage is not None
                assert updates[-1].usage.cached_tokens == found
                settle(island)


def workers_at(address: str) -> list[inference_pb2.WorkerInfo]:
    return [worker for island in info(address).islands for worker in island.workers]


@pytest.mark.long
def test_prefixes_survive_kills_of_their_workers(small_model: Path, tmp_path: Path) -> None:
    """Workers are killed while prefixes are written and read, and tokens stay those of transformers."""
    random = Random(1)
    prompts = [random_prompt(random.randint(60, 120), number, VOCABULARY) for number in range(12)]
    expected = greedy_all(load_oracle(small_model), prompts, OUTPUT)
    settings = {**OVERRIDES, "cache.num_pages": 24, "cache.host_bytes": 1 << 20}
    settings |= {"cache.disk_path": str(tmp_path / "disk"), "cache.disk_bytes": 64 << 20}
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **settings}), LocalProcesses(STEADY))
    address = cluster.start()
    try:

        def ask(number: int) -> tuple[list[int], int]:
            with Client(address) as client:
                updates = list(client.generate(prompts[number], max_tokens=OUTPUT, timeout=200, **GREEDY))
            assert updates[-1].usage is not None
            return tokens_of(updates), updates[-1].usage.disk_cached_tokens

        with ThreadPoolExecutor(6) as pool:
            for _ in range(KILLS):
                asked = [pool.submit(ask, number) for number in range(len(prompts))]
                time.sleep(0.3 * random.random())
                victim = random.choice([worker for worker in workers_at(address) if worker.alive] or [None])
                if victim is not None:
                    with suppress(ProcessLookupError):
                        os.kill(victim.pid, signal.SIGKILL)
                assert [one.result(200)[0] for one in asked] == expected
                until(lambda: whole(address))
        for worker in workers_at(address):
            os.kill(worker.pid, signal.SIGKILL)
        until(lambda: whole(address) and all(worker.counters.disk_adopted_pages for worker in workers_at(address)))
        found = [ask(number) for number in range(len(prompts))]
        assert [tokens for tokens, _ in found] == expected
        assert sum(tokens for _, tokens in found) > 0
        for worker in workers_at(address):
            assert (worker.counters.disk_bad_pages, worker.counters.disk_errors) == (0, 0)
            assert 0 < worker.disk_bytes_used <= worker.disk_bytes
    finally:
        cluster.stop()
