"""When cycles are looked for."""

import asyncio
import gc
import weakref

import pytest

from tandem.cluster.processes import garbage
from tandem.cluster.processes.garbage import IdleCollections


class Cyclic:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("longest", [0.0, 1e9])
@pytest.mark.parametrize("idle", [False, True])
def test_old_cycles_wait_until_nothing_is_to_be_done(
    monkeypatch: pytest.MonkeyPatch, idle: bool, longest: float
) -> None:
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(garbage, "LONGEST_SECONDS", longest)

    async def found() -> bool:
        running = asyncio.ensure_future(IdleCollections(lambda: idle).run())
        await asyncio.sleep(0)
        cyclic = Cyclic()
        gone = weakref.ref(cyclic)
        for generation in (0, 1):  # it is old now
            gc.collect(generation)
        del cyclic
        await asyncio.sleep(0.05)
        running.cancel()
        return gone() is None

    usual = gc.get_threshold()
    assert asyncio.run(found()) == (idle or longest == 0)
    assert gc.get_threshold() == usual


def test_memory_is_given_back_once_a_process_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, returned = [False, True, True, False, True, True, True, True, True], list[int]()
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(garbage, "QUIET_LOOKS", 3)
    monkeypatch.setattr(garbage, "return_freed_memory", lambda: returned.append(len(looks)))

    def is_idle() -> bool:
        if not looks:
            raise asyncio.CancelledError
        return looks.pop(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(IdleCollections(is_idle).run())
    assert returned == [2]


@pytest.mark.parametrize("grown", [False, True])
def test_a_busy_process_that_has_grown_looks_and_gives_memory_back(
    monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    resident, returned = [1000 << 20], list[int]()
    monkeypatch.setattr(garbage, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(garbage, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(garbage, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(garbage, "return_freed_memory", lambda: returned.append(resident[0]))

    async def run() -> bool:
        running = asyncio.ensure_future(IdleCollections(lambda: False).run())
        await asyncio.sleep(0)
        cyclic = Cyclic()
        gone = weakref.ref(cyclic)
        for generation in (0, 1):
            gc.collect(generation)
        del cyclic
        resident[0] = 500 << 20  # it had been larger
        await asyncio.sleep(0.02)
        resident[0] += garbage.GROWN_BYTES + grown
        await asyncio.sleep(0.05)
        running.cancel()
        return gone() is None

    assert asyncio.run(run()) == grown
    assert returned == [resident[0]] * grown  # once: it has not grown since
