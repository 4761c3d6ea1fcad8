"""Prefixes in pinned host memory: copies are ordered with the forwards, and workers' tokens equal transformers'."""

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
    return NamedPages(0, [bytes([page]) for page in pages], np.array(pages, np.int32))


@pytest.mark.parametrize("verify", [False, True])
def test_pages_may_be_overwritten_at_once(verify: bool) -> None:
    """Behind put() and in front of fetch(), while the device is busy with what came before."""
    pool = torch.randn(64, 1 << 18, device="cuda")
    content = pool[:32].clone()
    store = HostStore([pool], [32], verify=verify)
    assert store.memory.is_pinned()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-3
    store.put(named(*range(32)))
    pool[:32] = torch.nan
    (found,) = store.fetch([NamedPages(0, named(*range(32)).digests, np.arange(32, 64, dtype=np.int32))])
    assert found.all()
    assert torch.equal(pool[32:], content)
    store.settle()
    assert torch.equal(store.memory[: content.numel() * 4].view(torch.float32), content.flatten().cpu())
    store.memory[100] += 1
    (found,) = store.fetch([named(*range(32))])
    assert found.all() != verify


def test_a_peer_may_write_after_settle() -> None:
    """Into a page that was fetched and evicted while the device was busy: the copy does not come behind the write."""
    pool = torch.randn(4, 1 << 18, device="cuda")
    store = HostStore([pool], [4])
    store.put(named(0))
    store.settle()
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-3
    store.fetch([NamedPages(0, named(0).digests, np.array([1], np.int32))])
    store.put(NamedPages(0, named(0).digests, np.array([1], np.int32)))
    store.settle()
    with torch.cuda.stream(torch.cuda.Stream()):
        pool[1] = 7.0
    torch.cuda.synchronize()
    assert pool[1].eq(7.0).all()


def test_prompts_of_a_cache_come_back() -> None:
    """A small pool: each prompt evicts the one before."""
    cache = SHAPE.cache(SHAPE.pool(20))
    cache.keep_evicted(HostStore([cache._groups[0].site.pool], [200], verify=True))
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
