"""Prefixes in pinned host memory: copies are ordered with the forwards, and workers' tokens equal transformers'."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tests.gpu import test_families
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess
from tests.gpu.programs import Reference, Shape, run
from tests.gpu.test_families import processes, running_workers
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.tolerances import assert_close

__all__ = ["processes"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
SHAPE = Shape(torch.bfloat16, q_heads=32, kv_heads=8, head_dim=128, page_size=16)


def named(*pages: int) -> NamedPages:
    return NamedPages(0, [page.to_bytes(2, "big") for page in pages], np.array(pages, np.int32))


def keep_busy() -> None:
    """The device, for some 100 ms."""
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-3


@pytest.mark.parametrize("verify", [False, True])
def test_pages_may_be_overwritten_at_once(verify: bool) -> None:
    """The pages are overwritten after put() and before fetch(), while the device is busy with earlier work."""
    pool = torch.randn(64, 1 << 18, device="cuda")
    content = pool[:32].clone()
    store = HostStore([pool], [32], layers=[range(8)], verify=verify)
    first, second = np.arange(32, dtype=np.int32), np.arange(32, 64, dtype=np.int32)
    keep_busy()
    store.put(named(*range(32)))
    store.copies.wait_for(0, first)
    pool[:32] = torch.nan
    (found,) = store.fetch([NamedPages(0, named(*range(32)).digests, second)])
    assert found.all()
    store.copies.wait_for(0, second)
    assert torch.equal(pool[32:], content)
    torch.cuda.synchronize()
    assert store.copies.mark() is None
    assert store.memory.is_pinned
    assert store.memory.memory.is_pinned()
    assert torch.equal(store.memory.shelves[0].view(torch.float32).view_as(content), content.cpu())
    store.memory.shelves[0][0, 100] += 1
    (found,) = store.fetch([named(*range(32))])
    assert found.all() != verify


def test_layers_come_one_after_another() -> None:
    """A forward that waits for each of its layers finds it, whatever of the page is still under way."""
    pool = torch.randn(256, 8, 1 << 17, device="cuda")
    content = pool[:128].clone()
    store = HostStore([pool], [128], layers=[range(8)], begins=range(8))
    pages = np.arange(128, 256, dtype=np.int32)
    store.put(named(*range(128)))
    pool[128:] = torch.nan
    store.fetch([NamedPages(0, named(*range(128)).digests, pages)])
    arrivals = store.copies.arrivals(store.copies.newest(0, pages))
    assert arrivals is not None
    found = []
    for layer in range(8):
        arrivals.wait(layer)
        found.append(pool[128:, layer].clone())
    assert torch.equal(torch.stack(found, 1), content)


def test_copies_run_beside_a_forward() -> None:
    """Nothing that touches none of their pages waits for them."""
    pool = torch.randn(2048, 1 << 18, device="cuda")
    store = HostStore([pool], [1024])
    for number in range(1024):
        store.memory.await_slot(0, number)
    store.put(named(*range(1024)))
    before = store.copies.mark()
    pool[1500] = 1.0
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert before is not None
    assert not before()  # 1 GiB takes longer than a page
    torch.cuda.synchronize()
    assert before()


def test_a_peer_may_write_after_the_mark() -> None:
    """The peer writes into a page that was fetched and evicted while the device was busy. The copy does not come after
    the write."""
    pool = torch.randn(4, 1 << 18, device="cuda")
    store = HostStore([pool], [4])
    store.put(named(0))
    torch.cuda.synchronize()
    keep_busy()
    store.fetch([NamedPages(0, named(0).digests, np.array([1], np.int32))])
    store.put(NamedPages(0, named(0).digests, np.array([1], np.int32)))
    past = store.copies.mark()
    assert past is not None
    assert not past()
    while not past():
        time.sleep(0.001)
    with torch.cuda.stream(torch.cuda.Stream()):
        pool[1] = 7.0
    torch.cuda.synchronize()
    assert pool[1].eq(7.0).all()


@pytest.mark.parametrize("verify", [False, True])
def test_prompts_of_a_cache_come_back(verify: bool) -> None:
    """A small pool: each prompt evicts the one before."""
    cache = SHAPE.cache(SHAPE.pool(20))
    pool = cache._groups[0].site.pool
    store = HostStore([pool], [200], layers=[range(pool.shape[1])], begins=range(pool.shape[1]), verify=verify)
    cache.keep_evicted(store)
    prompts = [np.arange(number * 1000, number * 1000 + 250) for number in range(3)]
    inputs = [SHAPE.draw(251, seed=number) for number in range(3)]
    for number in (0, 1, 2, 0, 1, 2, 0):
        sequence = 100 + number
        cache.add_sequence(sequence)
        found = cache.match_prefix(sequence, prompts[number])
        rest = [(q[found:], k[found:], v[found:]) for q, k, v in inputs[number]]
        expected = Reference(SHAPE).run({sequence: 251}, inputs[number])
        for actual, whole in zip(run(cache, {sequence: 251 - found}, rest), expected, strict=True):
            assert_close(actual, whole[found:])
        cache.publish_prefix(sequence, prompts[number])
        cache.remove_sequence(sequence)
    assert cache.pages.host_hits == 4
    assert cache.pages.host_bad_pages == 0


@NEEDS_NVSHMEM
@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v3"])
def test_workers_with_few_pages(
    case: str, processes: list[PeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_families, "NUM_PAGES", 20)
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(180 + number, number) for number in range(5)]
    expected = greedy_all(load_oracle(folder), prompts, 20)
    settings = {"cache.host_bytes": 64 << 20, "cache.verify_host": True}
    with running_workers(processes, folder, "float32", settings=settings) as address:
        for _ in range(3):
            assert complete_all(address, prompts, max_tokens=20, **GREEDY) == expected
