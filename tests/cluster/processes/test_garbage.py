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
