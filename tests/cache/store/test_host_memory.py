"""Memory that a thread pins beside the start: the part that may be used, with a driver that pins what the test says."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tandem.cache.store.host_memory import HostMemory
from tandem.cache.store.host_store import HostStore
from tandem.cache.store.page_store import NamedPages
from tests.cache.store.pinning import Driver, pin_by

SLOTS, SLOT_BYTES = (40, 12), (4096, 1000)


def pinned_by(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    pin_by(driver, monkeypatch)
    return HostMemory(SLOTS, SLOT_BYTES, torch.device("cuda"), "cache.host_bytes")


def test_all_of_it_is_pinned_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    memory = pinned_by(driver, monkeypatch)
    memory.await_slot(0, 39)
    memory.await_slot(1, 11)
    assert memory.is_pinned
    assert sum(driver.pinned.values()) == memory.memory.numel() == 40 * 4096 + 3 * 4096
    memory.shelves[1][11] = 7
    assert (memory.shelves[0] == 0).all()
    del memory
    assert not driver.pinned


def test_what_the_host_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(most=3)
    memory = pinned_by(driver, monkeypatch)
    with pytest.raises(
        MemoryError, match=r"cache\.host_bytes: of 176128 bytes this host could pin \d+; set no more"
    ) as caught:
        memory.await_slot(0, 39)
    del caught
    assert not memory.is_pinned
    used = sum(count * size for count, size in zip(memory.pinned, SLOT_BYTES, strict=True))
    assert 0 < used <= sum(driver.pinned.values())
    assert "could pin" in caplog.text
    del memory
    assert not driver.pinned


def test_a_view_of_it_keeps_it_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that copy to a shelf hold nothing else of the memory."""
    driver = Driver()
    memory = pinned_by(driver, monkeypatch)
    memory.await_slot(0, 39)
    memory.await_slot(1, 11)
    shelf = memory.shelves[1]
    del memory
    gc.collect()
    assert driver.pinned
    shelf[3] = 7
    del shelf
    assert not driver.pinned


def test_a_store_keeps_what_it_was_widened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [torch.arange(12.0).view(6, 2), torch.arange(6.0).view(3, 2)]
    store = HostStore(pools, (4, 2), grows=True)
    names = NamedPages(0, [bytes([name]) for name in range(3)], np.arange(3, dtype=np.int32))
    store.put(names)
    assert not store.find(0, names.digests).any()
    assert store.ready_slots == (4, 2)
    monkeypatch.setattr(store, "_memory", SimpleNamespace(pinned=(2, 0), await_slot=store.memory.await_slot))
    assert store.ready_slots == (2, 0)
    store.widen((2, 0))
    assert store.ready_slots is None
    store.put(names)
    assert store.find(0, names.digests).tolist() == [False, True, True]
    store.widen((4, 2))
    assert store.ready_slots is None
    store.put(names)
    assert store.find(0, names.digests).all()
    assert store.counts.capacity == 4 * 8 + 2 * 8
