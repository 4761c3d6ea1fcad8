"""Checks the changes that a prefix index reports. A reader that applies each change knows the index, however seldom it
asks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.prefix_index import PrefixIndex
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.prefix_chain import digest_chain

PAGE, NUM_PAGES = 2, 24
PROMPTS = [[system, system, *turns] for system in (0, 1) for turns in ([], [2, 3], [2, 3, 4, 5], [6, 7, 4, 5, 8, 9])]


class Reader:
    """Knows the keys of an index from its changes alone."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.keys: set[int] = set()
        self.wholes = 0

    def read(self, index: PrefixIndex) -> None:
        changes = index.changes(self.position)
        self.position = changes.position
        if changes.whole:
            self.wholes += 1
            self.keys.clear()
        added, removed = set(changes.added.tolist()), set(changes.removed.tolist())
        assert not added & removed
        self.keys = (self.keys - removed) | added


def keys_in(index: PrefixIndex) -> set[int]:
    return {int.from_bytes(digest[:8], "little") for digest in index._entries}


OPERATIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, len(PROMPTS) - 1), st.sampled_from([b"", b"a"])),
    st.tuples(st.just("evict"), st.integers(1, 4), st.just(b"")),
    st.tuples(st.just("clear"), st.just(0), st.just(b"")),
    st.tuples(st.just("read"), st.integers(0, 1), st.just(b"")),
)


@given(st.lists(OPERATIONS, max_size=60))
def test_readers_know_the_index_after_any_program(program: list[tuple[str, int, bytes]]) -> None:
    allocator = PageAllocator(NUM_PAGES)
    index = PrefixIndex((allocator,), PAGE)
    readers = [Reader(), Reader()]
    for kind, number, salt in program:
        if kind == "publish":
            tokens = np.array(PROMPTS[number])
            _, (held,) = index.match(index.digests(tokens, tokens.size // PAGE, salt))
            missing = tokens.size // PAGE - held.size
            if missing > allocator.num_free:
                continue
            allocator.retain(held)
            pages = np.concatenate((held, allocator.allocate(missing)))
            index.publish(tokens, (pages,), salt)
            allocator.release(pages)
        elif kind == "evict":
            index.evict(0, min(number, len(index))) if len(index) else None
        elif kind == "clear":
            index.clear()
        else:
            readers[number].read(index)
            assert readers[number].keys == keys_in(index)
    for reader in readers:
        reader.read(index)
        assert reader.keys == keys_in(index)


def test_a_reader_that_is_too_late_gets_all_and_the_log_stays_bounded() -> None:
    allocator = PageAllocator(NUM_PAGES)
    index = PrefixIndex((allocator,), PAGE)
    late, quick = Reader(), Reader()
    late.read(index)
    for number in range(10 * NUM_PAGES):
        pages = allocator.allocate(1)
        index.publish(np.array([number, number]), (pages,))
        allocator.release(pages)
        index.evict(0, 1)
        quick.read(index)
    assert (quick.wholes, late.wholes) == (1, 1)
    late.read(index)
    assert late.wholes == 2
    assert late.keys == quick.keys == keys_in(index)
    assert index._log._num_keys <= NUM_PAGES
    assert len(index._log._records) <= NUM_PAGES


def test_salts_and_pages_have_names_of_their_own() -> None:
    tokens = np.arange(3 * PAGE)
    salts = (b"", b"\0", b"\0\0", b"a", b"a\0", b"x" * 16)
    chains = [list(digest_chain(tokens, PAGE, 3, salt)) for salt in salts]
    assert len({digest for chain in chains for digest in chain}) == 3 * len(salts)
    # A digest is no salt for the pages after it: they would be found where they do not begin.
    forged = list(digest_chain(tokens[PAGE:], PAGE, 2, chains[0][0]))
    assert not set(forged) & set(chains[0])
    with pytest.raises(InvalidArgument, match="salt has 17 bytes; it may have at most 16"):
        digest_chain(tokens, PAGE, 3, b"x" * 17)
