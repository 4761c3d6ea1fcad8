"""Pages that the device may still use are nobody's yet: a peer's writes know no order with what runs here."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.transfer.recall import mailbox_rows
from tandem.workers.engine.engine import Engine
from tandem.workers.handoff.retired import IsPast, RetiredSequences
from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.runner.model_runner import ModelRunner
from tests.cache.naive import layout_of
from tests.support.fake_transport import FakeFabric

LAYOUT = layout_of(1)


class Device:
    """Forwards are done one by one."""

    graph_sizes = GraphSizes()
    adapters = None

    def __init__(self, *, drops_past: bool = False, recurs: bool = False, slides: bool = False) -> None:
        self.launched = self.done = 0
        self.copied: IsPast | None = None
        self.removed: list[int] = []
        cache: Any = SimpleNamespace(
            layout=SimpleNamespace(drops_past=drops_past, recurs=recurs),
            max_sequence_length=0,
            remove_sequence=self.removed.append,
            any_slides=lambda: slides,
            copies_past=lambda: self.copied,
        )
        (transport,) = FakeFabric(1, LAYOUT, num_pages=1, num_signals=mailbox_rows(1, 1)).joined()
        self.retired = RetiredSequences(Engine(cache, cast(ModelRunner, self), transport))

    def mark(self) -> IsPast | None:
        last = self.launched
        return None if self.done == last else lambda: self.done >= last


def test_a_sequence_goes_when_the_device_is_past_its_forwards() -> None:
    device = Device()
    device.launched = 2
    device.retired.add(1)
    device.launched = 3
    device.retired.add(2)
    device.done = 1
    device.retired.settle()
    assert (device.removed, len(device.retired)) == ([], 2)
    device.done = 2
    device.retired.settle()
    assert device.removed == [1]
    device.done = 3
    device.retired.settle()
    assert (device.removed, len(device.retired)) == ([1, 2], 0)


def test_a_sequence_goes_at_once_when_nothing_runs() -> None:
    device = Device()
    device.retired.add(1)
    assert device.removed == [1]


@pytest.mark.parametrize("reason", ["drops_past", "recurs", "slides"])
def test_peers_wait_for_forwards_that_use_pages_let_go_of(reason: str) -> None:
    device = Device(**{reason: True})
    assert device.retired.windows_past() is None
    device.launched = 1
    past = device.retired.windows_past()
    assert past is not None
    device.launched = 2  # what comes later takes no page of what was offered
    device.retired.settle()
    assert not past.done()
    device.done = 1
    device.retired.settle()
    assert past.done()


def test_peers_wait_for_copies_of_pages() -> None:
    device, copied = Device(), list[bool]()
    device.launched, device.copied = 1, lambda: bool(copied)
    past = device.retired.windows_past()
    assert past is not None
    device.retired.settle()
    assert not past.done()
    copied.append(True)
    device.retired.settle()
    assert past.done()


def test_without_windows_peers_wait_for_nothing() -> None:
    device = Device()
    device.launched = 1
    assert device.retired.windows_past() is None
