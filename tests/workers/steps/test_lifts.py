"""Prompts that wait for pages of a disk, and what the router is told of its price."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.cache.operations.holdings import PageCounts
from tandem.workers.steps import lifts
from tandem.workers.steps.lifts import Lifts
from tandem.workers.steps.step_loop import StepLoop
from tandem.workers.wire.prompt_spec import PromptSpec

Wanted = list[tuple[int, list[bytes]]]


class Disk:
    """The part of an engine that Lifts uses. A prompt's pages are named by its first token."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # by first token
        self.read = set[int]()
        self.landed = list[int]()
        self.bounds = list[int | None]()

    def below(self, prompt: PromptSpec, most_bytes: int | None) -> Wanted:
        self.bounds.append(most_bytes)
        return [(0, [bytes([int(prompt.token_ids[0])])])] if most_bytes is None else []

    def lift(self, wanted: Wanted) -> int:
        ((_, (name,)),) = wanted
        return self.numbers.setdefault(name[0], len(self.numbers) + 1)

    def is_lifted(self, number: int) -> bool:
        return number in self.read

    def land(self, number: int) -> None:
        self.landed.append(number)

    def tend(self) -> None:
        pass


def lifts_of(disk: Any, most_bytes: int | None = None) -> Lifts:
    return Lifts(disk, lambda: most_bytes, lambda prompt: not prompt.whole)


def prompt(first: int, **options: Any) -> PromptSpec:
    return PromptSpec(np.array([first, 1], np.int64), **options)


def test_requests_wait_until_their_pages_have_landed_in_order() -> None:
    disk = Disk()
    waiting = lifts_of(disk)
    one, other, again = (waiting.begin(prompt(first)) for first in (5, 6, 5))
    assert isinstance(one, Future)
    assert isinstance(other, Future)
    assert again is one
    assert not one.cancel()
    disk.read.add(2)
    waiting.upkeep()
    assert (disk.landed, other.done()) == ([], False)
    assert waiting.soon(None) == waiting.soon(5.0) == lifts.POLL_SECONDS
    assert waiting.soon(0) == 0
    disk.read.add(1)
    waiting.upkeep()
    assert (disk.landed, one.done(), other.done()) == ([1, 2], True, True)
    assert waiting.soon(5.0) == 5.0


def test_a_request_that_shares_nothing_or_for_which_the_disk_is_slow_waits_for_nothing() -> None:
    disk = Disk()
    assert lifts_of(disk).begin(prompt(5, whole=True)) is None
    assert not disk.bounds
    assert lifts_of(disk, 7).begin(prompt(5)) is None
    assert disk.bounds == [7]
    assert not disk.numbers


def test_no_more_lifts_are_under_way_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifts, "MOST_LIFTS", 2)
    waiting = lifts_of(Disk())
    assert [waiting.begin(prompt(first)) is None for first in (5, 6, 7)] == [False, False, True]


@pytest.mark.parametrize(
    ("host", "disk", "most", "most_read", "price"),
    [
        (0, 0, None, None, 0.0),
        (100, 0, 40, None, 0.25),
        (100, 400, 40, 20, 0.25 / 4 + 3 * 0.5 / 4),
        (100, 400, 40, None, 0.25 / 4),
        (100, 100, 0, 0, 1.0),
    ],
)
def test_the_price_is_that_of_each_tier_by_its_bytes(
    host: int, disk: int, most: int | None, most_read: int | None, price: float
) -> None:
    """A token has 10 bytes. most: bytes that come back while one token is computed."""
    engine = SimpleNamespace(layout=SimpleNamespace(token_bytes=10))
    loop: Any = SimpleNamespace(
        engine=engine, has_disk=True, _most_bytes=lambda: most, _most_bytes_read=lambda: most_read
    )
    pages = PageCounts(1, 1, 0, 0, host_bytes_used=host, disk_bytes_used=disk)
    assert StepLoop._stored_price(loop, pages) == pytest.approx(price)
