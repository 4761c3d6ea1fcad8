"""Pages of a worker's pools."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.shard import Shard
from tandem.workers import pool_pages as pool_pages_module
from tandem.workers.config import Role, WorkerConfig
from tandem.workers.models.registry import load_config
from tandem.workers.pool_pages import (
    disk_space,
    host_bytes_needed,
    host_slots,
    host_store,
    pages_in,
    pool_pages,
    snapshot_rule,
    with_host_bytes,
)
from tandem.workers.ranks.ranks import ALONE
from tandem.workers.runner.model_cache import kv_layout
from tests.workers.models.test_nemotron_config import DENSE, write


@pytest.mark.parametrize(
    ("num_pages", "share", "interval", "sequences", "most"),
    [
        (1024, 0.25, 512, 256, 17),  # the defaults: 264 sequences
        (1024, 0.25, 512, 8, 1),
        (20, 0.25, 512, 256, 2),  # of 20 sequences, which have a page each
        (1581 * 17, 0.25, 512, 256, 17),
        (1581 * 18, 0.25, 512, 256, 18),
        (1581, 0.5, 512, 8, 2),
        (1024, 0.0, 512, 256, 0),
        (1024, 0.25, None, 256, 0),
    ],
)
def test_however_few_pages_there_are_some_are_for_snapshots(
    tmp_path: Path, num_pages: int, share: float, interval: int | None, sequences: int, most: int
) -> None:
    """The model is Nemotron-H-8B, where a snapshot takes as much as K and V of 395.2 pages."""
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    where = (Role.DECODE, "island", 1, 0, 1, "", 1024, "")
    config = WorkerConfig(*where, state_share=share, state_interval=interval, max_sequences=sequences)
    assert snapshot_rule(config, layout, num_pages).most == most
    pages = pool_pages(config, layout, num_pages)
    assert pages == (num_pages, min(num_pages, sequences + 8) + most)
    num_bytes = sum(count * layout.page_bytes(group) for group, count in enumerate(pages))
    assert pages_in(config, layout, num_bytes) == num_pages


def test_host_bytes_are_shared_as_pools_are(tmp_path: Path) -> None:
    """Ranks divide them. The fewest that are allowed hold a page of each group."""
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    where = (Role.DECODE, "island", 1, 0, 1, "", 1024, "")
    config = WorkerConfig(*where, state_share=0.5, max_sequences=8)
    kv, state = layout.page_bytes(0), layout.page_bytes(1)
    given = replace(config, host_bytes=10 * (1024 * kv + state))
    assert host_slots(given, layout, 1024) == (10 * 1024, 10)  # its share holds one snapshot
    assert host_slots(replace(given, ranks=(2,)), layout, 1024) == (5 * 1024, 5)
    assert host_slots(replace(given, state_share=0.0), layout, 1024)[1] == 0
    for ranks in ((), (2,)):
        one = replace(config, ranks=ranks)
        least = host_bytes_needed(one, layout, 1024)
        assert min(host_slots(replace(one, host_bytes=least), layout, 1024)) == 1
        assert min(host_slots(replace(one, host_bytes=least - 1), layout, 1024)) == 0
        with pytest.raises(InvalidArgument, match=rf"cache\.host_bytes is 9; it must be at least {least}"):
            host_store(replace(one, host_bytes=9), layout, 1024, (), ALONE)
    assert host_store(config, layout, 1024, (), ALONE) is None
    assert host_store(replace(config, host_bytes=0), layout, 1024, (), ALONE) is None


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 0.5),
        ({"workers_on_host": 1}, 8),
        ({"ranks": (2, 2)}, 2),
        ({"host_bytes": 0}, 0),
        ({"host_bytes": 7}, 7 / (1 << 30)),
        ({"state_share": 0.0}, 0),
        ({"device": "cpu"}, None),
    ],
)
def test_a_worker_takes_a_part_of_its_host(
    changes: dict[str, Any], gib: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does on a GPU, if nothing else is configured and the part would hold something."""
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    where = (Role.DECODE, "island", 1, 0, 1, "", 1024, "")
    config = WorkerConfig(*where, max_sequences=8, device="cuda", workers_on_host=16 // len(changes.get("ranks", (1,))))
    monkeypatch.setattr(pool_pages_module, "machine_memory", lambda: 32 << 30)
    found = with_host_bytes(replace(config, **changes), layout, 1024).host_bytes
    assert found == (None if gib is None else int(gib * (1 << 30)))


def test_a_worker_takes_no_more_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = kv_layout(load_config(write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})), 16)
    config = WorkerConfig(Role.DECODE, "island", 1, 0, 1, "", 1024, "", max_sequences=8, device="cuda")
    for there, found in ((1 << 42, 64 << 30), (1 << 10, 0)):
        monkeypatch.setattr(pool_pages_module, "machine_memory", lambda there=there: there)
        assert with_host_bytes(config, layout, 1024).host_bytes == found


def test_disk_bytes_are_shared_as_host_bytes_are(tmp_path: Path) -> None:
    """Each rank has a folder and its part; other weights, types or ranks have another fingerprint."""
    folder = write(tmp_path, {**DENSE, "torch_dtype": "bfloat16"})
    layout = kv_layout(load_config(folder), 16)
    where = (Role.DECODE, "island", 1, 3, 4, str(folder), 1024, "")
    config = WorkerConfig(*where, state_share=0.5, max_sequences=8, disk_path="/disk", load_format="dummy")
    kv, state = layout.page_bytes(0), layout.page_bytes(1)
    given = replace(config, disk_bytes=10 * (1024 * kv + state))
    space = disk_space(given, layout, 1024, layout)
    assert list(space.num_bytes) == [10 * 1024 * kv, 10 * state]
    assert str(space.folder) == "/disk/island/worker3-rank0"
    ranks = replace(given, ranks=(1, 1, 1, 2), rank=1)
    assert list(disk_space(ranks, layout, 1024, layout).num_bytes) == [5 * 1024 * kv, 5 * state]
    assert str(disk_space(ranks, layout, 1024, layout).folder) == "/disk/island/worker3-rank1"
    with pytest.raises(InvalidArgument, match=r"cache\.disk_bytes is 9; it must be at least \d+"):
        disk_space(replace(given, disk_bytes=9), layout, 1024, layout)
    other = replace(layout, shard=Shard(1, 2))
    prints = {space.fingerprint, disk_space(given, layout, 1024, other).fingerprint}
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": "float32"},
        {"max_model_len": 2048},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"k_scale": 2.0},
    )
    for more in changes:
        prints.add(disk_space(replace(given, **more), layout, 1024, layout).fingerprint)
    assert len(prints) == 6
    assert disk_space(given, layout, 1024, layout).fingerprint == space.fingerprint
    write(tmp_path, {**DENSE, "torch_dtype": "bfloat16", "layer_norm_epsilon": 1e-3})
    assert disk_space(given, layout, 1024, layout).fingerprint not in prints
