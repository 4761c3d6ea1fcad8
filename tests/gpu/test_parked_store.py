"""Sequences that are parked in pinned host memory: copies are ordered with the forwards around them."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.store import host_memory
from tandem.cache.store.parked_store import ParkedStore
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


def test_copies_are_ordered_with_forwards_and_among_themselves() -> None:
    """Pages are written after put(), and slots after fetch(), while the device is busy with earlier work."""
    pool = torch.randn(64, 1 << 18, device="cuda")
    content = pool[:32].clone()
    store = ParkedStore([pool], [32])
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy * 1e-3
    store.put(1, [np.arange(32, dtype=np.int32)])
    assert store.copies.mark() is not None
    store.copies.wait_for(0, np.arange(32, dtype=np.int32))
    pool[:32] = torch.nan
    store.fetch(1, [np.arange(32, 64, dtype=np.int32)])
    store.drop(1)
    store.put(2, [np.arange(32, dtype=np.int32)])
    torch.cuda.synchronize()
    assert torch.equal(pool[32:], content)


class HeldRuntime:
    """The CUDA runtime, which pins one piece of memory, and the others when `goes_on` is set."""

    def __init__(self) -> None:
        self._cudart: Any = torch.cuda.cudart()
        self.goes_on, self._num_pinned = threading.Event(), 0

    def cudaHostRegister(self, *of: int) -> int:
        if self._num_pinned:
            self.goes_on.wait()
        self._num_pinned += 1
        return self._cudart.cudaHostRegister(*of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart, name)


def test_sequences_are_parked_while_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = torch.randn(32, 1 << 18, device="cuda")
    content, runtime = pool.clone(), HeldRuntime()
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 16 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    store, first, second = ParkedStore([pool], [32]), np.arange(16, dtype=np.int32), np.arange(16, 32, dtype=np.int32)
    try:
        store.memory.await_slot(0, 15)
        assert (store.fits([16]), store.fits([17])) == (True, False)
        store.put(1, [first])
        assert not store.fits([1])
    finally:
        runtime.goes_on.set()
    store.put(2, [second])
    for pages in (first, second):
        store.copies.wait_for(0, pages)
    pool[:] = torch.nan
    store.fetch(1, [second])
    store.fetch(2, [first])
    torch.cuda.synchronize()
    assert torch.equal(pool, content.roll(16, 0))
    assert store.memory.is_pinned


def test_a_sequence_of_a_cache_comes_back() -> None:
    """Another one uses its pages meanwhile."""
    cache = SHAPE.cache(SHAPE.pool(20))
    store = ParkedStore([cache._groups[0].site.pool], [20])
    store.memory.await_slot(0, 19)
    cache.keep_parked(store)
    inputs = [SHAPE.draw(251, seed=number) for number in range(2)]
    expected = [Reference(SHAPE).run({number: 251}, inputs[number]) for number in range(2)]

    def step(number: int, begin: int, end: int) -> None:
        part = [(q[begin:end], k[begin:end], v[begin:end]) for q, k, v in inputs[number]]
        for actual, whole in zip(run(cache, {number: end - begin}, part), expected[number], strict=True):
            assert_close(actual, whole[begin:end])

    cache.add_sequence(0)
    step(0, 0, 200)
    assert cache.can_park(0)
    cache.park(0)
    cache.remove_sequence(0)
    cache.add_sequence(1)
    step(1, 0, 251)
    cache.remove_sequence(1)
    cache.resume(0, 251)
    step(0, 200, 251)


@NEEDS_NVSHMEM
@pytest.mark.parametrize("reserved", [1.0, 0.1])
@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_workers_with_few_pages(
    case: str, reserved: float, processes: list[PeProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Priorities come in turns: each prompt is sent with another one."""
    monkeypatch.setattr(test_families, "NUM_PAGES", 40)
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(80 + number, number) for number in range(12)]
    expected = greedy_all(load_oracle(folder), prompts, 60)
    settings: dict[str, Any] = {"cache.parked_bytes": 256 << 20, "scheduler.reserved_output": reserved}
    settings |= {"scheduler.priority_seconds": 0.5}
    with running_workers(processes, folder, "float32", settings=settings) as address:
        for priority in (10, 0):
            assert complete_all(address, prompts, max_tokens=60, priority=priority, **GREEDY) == expected
