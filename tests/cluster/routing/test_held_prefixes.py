"""Prefixes in pages and in host memory, as routing policies see them."""

import numpy as np
import pytest

from tandem.cache.plan.prefix_chain import KEY_BYTES, digest_chain
from tandem.cluster.routing.held_prefixes import HeldPrefixes
from tandem.cluster.routing.prefix_view import PromptKeys
from tandem.proto import worker_pb2

PAGE = 4
TOKENS = np.arange(41)
KEYS = [digest[:KEY_BYTES] for digest in digest_chain(TOKENS, PAGE, 10, b"")]


def keys(first: int, last: int) -> bytes:
    return b"".join(KEYS[first:last])


def report(pages: int, stored: int, price: float, *, whole: bool = True) -> worker_pb2.WorkerReport:
    return worker_pb2.WorkerReport(
        whole=whole,
        added=keys(0, pages),
        stored_whole=whole,
        stored_added=keys(0, stored),
        stored_price=price,
    )


def match(view: HeldPrefixes[str]) -> dict[str, int]:
    return view.match(PromptKeys(TOKENS, PAGE))


@pytest.mark.parametrize(
    ("pages", "stored", "price", "worth"),
    [(3, 0, 0.0, 12), (3, 3, 0.5, 12), (3, 8, 0.25, 12 + 15), (0, 10, 0.75, 10), (2, 9, 1.0, 8), (0, 5, 0.0, 20)],
)
def test_what_the_host_holds_counts_at_its_price(pages: int, stored: int, price: float, worth: int) -> None:
    view = HeldPrefixes[str]()
    view.apply("one", report(pages, stored, price))
    assert match(view) == {"one": worth}
    view.drop("one")
    assert match(view) == {}


def test_a_worker_that_would_not_copy_holds_nothing() -> None:
    view = HeldPrefixes[str]()
    view.apply("dear", report(0, 10, 1.0))
    view.apply("cheap", report(1, 10, 0.5))
    assert match(view) == {"cheap": 4 + 18}
    view.apply("cheap", worker_pb2.WorkerReport(stored_removed=keys(5, 10), stored_price=0.5))
    assert match(view) == {"cheap": 4 + 8}
