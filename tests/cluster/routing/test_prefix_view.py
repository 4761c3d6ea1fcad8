"""Tests which worker holds how much of a prompt: the view must agree with the workers' reports."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.routing.prefix_view import BLOCK, PrefixView, PromptKeys
from tandem.proto import worker_pb2

PAGE = 2


def keys_of(tokens: list[int], pages: int, salt: bytes = b"") -> bytes:
    """Makes keys as a worker reports the first pages of a prompt."""
    keys = PromptKeys(np.array([*tokens, 0]), PAGE, salt).first(pages)[:pages]
    return np.array(keys, "<u8").tobytes()


def report(added: bytes = b"", removed: bytes = b"", *, whole: bool = False) -> worker_pb2.WorkerReport:
    return worker_pb2.WorkerReport(added=added, removed=removed, whole=whole)


@given(
    length=st.one_of(st.integers(1, 9), st.integers(1, 3 * BLOCK * PAGE + 1)),
    held=st.lists(st.integers(0, 3 * BLOCK), max_size=9),
)
def test_each_worker_matches_as_many_pages_as_it_holds(length: int, held: list[int]) -> None:
    tokens = list(range(3 * BLOCK * PAGE + 1))
    view: PrefixView[int] = PrefixView()
    for worker, pages in enumerate(held):
        view.apply(worker, report(keys_of(tokens, pages), whole=True))
    prompt = PromptKeys(np.array(tokens[:length]), PAGE)
    most = (length - 1) // PAGE  # one token is always computed
    expected = {worker: min(pages, most) * PAGE for worker, pages in enumerate(held) if min(pages, most)}
    assert view.match(prompt) == expected
    assert view.match(prompt) == expected  # from keys that are there already


HELD = st.lists(st.sets(st.integers(0, 2 * BLOCK)), max_size=5)


@given(HELD)
def test_a_match_ends_with_a_page_that_is_held_though_others_are_evicted(held: list[set[int]]) -> None:
    tokens = list(range((2 * BLOCK + 1) * PAGE))
    keys = keys_of(tokens, 2 * BLOCK + 1)
    view: PrefixView[int] = PrefixView()
    for worker, pages in enumerate(held):
        view.apply(worker, report(b"".join(keys[8 * page : 8 * page + 8] for page in pages)))
    found = view.match(PromptKeys(np.array([*tokens, 0]), PAGE))
    assert set(found) == {worker for worker, pages in enumerate(held) if 0 in pages}
    for worker, length in found.items():
        assert length // PAGE - 1 in held[worker]


def test_keys_are_made_no_further_than_anybody_holds_the_prompt() -> None:
    tokens = list(range(4 * BLOCK * PAGE))
    view: PrefixView[str] = PrefixView()
    prompt = PromptKeys(np.array(tokens), PAGE)
    assert view.match(prompt) == {}
    view.apply("a", report(keys_of(tokens, 1)))
    assert view.match(prompt) == {"a": PAGE}
    assert len(prompt.first(0)) <= 1 + BLOCK


def test_another_salt_is_another_prompt() -> None:
    tokens = list(range(9))
    view: PrefixView[str] = PrefixView()
    view.apply("a", report(keys_of(tokens, 4, b"mine")))
    assert view.match(PromptKeys(np.array(tokens), PAGE, b"mine")) == {"a": 8}
    assert view.match(PromptKeys(np.array(tokens), PAGE, b"theirs")) == {}
    assert view.match(PromptKeys(np.array(tokens), PAGE)) == {}


KEYS = st.lists(st.integers(0, 12), max_size=6, unique=True)


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["change", "whole", "drop"]), KEYS, KEYS), max_size=40))
def test_any_reports_leave_what_they_say(program: list[tuple[int, str, list[int], list[int]]]) -> None:
    view: PrefixView[int] = PrefixView()
    model: dict[int, set[int]] = {}
    for worker, kind, added, removed in program:
        if kind == "drop":
            view.drop(worker)
            model.pop(worker, None)
            continue
        bytes_of = [np.array(keys, "<u8").tobytes() for keys in (added, removed)]
        view.apply(worker, report(*bytes_of, whole=kind == "whole"))
        before = set() if kind == "whole" else model.get(worker, set())
        model[worker] = (before - set(removed)) | set(added)
    found = {worker: {key for key, mask in view._masks.items() if mask & bit} for worker, bit in view._bits.items()}
    assert {worker: keys for worker, keys in found.items() if keys} == {w: keys for w, keys in model.items() if keys}
    assert view._gone.bit_count() < max(1, len(view._bits))  # little is kept for workers that are gone
    kept = [key for key, mask in view._masks.items() if mask & ~view._gone]
    assert len(kept) == len(set().union(*model.values()))
    for worker in list(view._bits):
        view.drop(worker)
    assert len(view) == 0


def test_a_worker_that_takes_the_place_of_one_that_is_gone_holds_none_of_its_pages() -> None:
    tokens = list(range(9))
    view: PrefixView[str] = PrefixView()
    for worker in "abcd":
        view.apply(worker, report(keys_of(tokens, 4)))
    for worker in "ae":
        view.drop("a")
        view.apply(worker, report(keys_of(tokens, 1)))
        assert view.match(PromptKeys(np.array(tokens), PAGE)) == {"b": 8, "c": 8, "d": 8, worker: 2}
