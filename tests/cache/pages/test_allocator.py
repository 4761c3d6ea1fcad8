"""Page counts, by C and by numpy."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tandem.cache.pages import allocator as allocator_module
from tandem.cache.pages.allocator import PageAllocator, load_page_counts
from tandem.cache.plan.errors import InvalidArgument, OutOfPages

NUM_PAGES = 24


@pytest.fixture(scope="module", autouse=True, params=["native", "numpy"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(allocator_module, "load_page_counts", lambda: None)
        elif load_page_counts() is None:
            pytest.skip("needs a C compiler")
        yield request.param


def runs(pages: np.ndarray) -> list[int]:
    """Lengths of the runs of consecutive ids, in order."""
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    return [part.size for part in np.split(pages, cuts)]


def with_free_runs(*lengths: int) -> PageAllocator:
    """An allocator whose free pages are runs of these lengths, one page in use between them."""
    allocator = PageAllocator(sum(lengths) + len(lengths))
    pages = allocator.allocate(allocator.num_pages)
    used = np.cumsum(np.array(lengths) + 1) - 1
    allocator.release(np.delete(pages, used))
    return allocator


def test_fresh_pages_are_one_run() -> None:
    assert PageAllocator(100).allocate(100).tolist() == list(range(100))


def test_the_shortest_run_that_fits_is_taken() -> None:
    assert with_free_runs(9, 4, 3, 6).allocate(4).tolist() == [10, 11, 12, 13]
    assert with_free_runs(9, 4, 3, 6).allocate(5).tolist() == [19, 20, 21, 22, 23]


def test_the_longest_runs_are_taken_where_none_fits() -> None:
    pages = with_free_runs(3, 8, 2, 5).allocate(11)
    assert sorted(runs(pages)) == [3, 8]
    assert np.all(np.diff(pages) > 0)


def test_out_of_pages_changes_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages needed, 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert allocator.allocate(2).size == 2


def test_a_second_release_is_refused() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    with pytest.raises(InvalidArgument, match="more often"):
        allocator.release(np.repeat(pages, 2))
    allocator.release(pages)
    for call in (allocator.release, allocator.settle, allocator.retain, allocator.hold):
        with pytest.raises(InvalidArgument):
            call(pages)
    assert allocator.num_free == 8


def test_a_page_outlives_its_readers_while_it_has_a_writer() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    allocator.hold(pages[:2])
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_draining) == (2, 2)
    assert not set(allocator.allocate(2).tolist()) & set(pages[:2].tolist())
    allocator.settle(pages[:2])
    assert (allocator.num_free, allocator.num_draining) == (2, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_few_runs(free: list[bool], data: st.DataObject) -> None:
    """No choice of the same number of free pages has fewer runs."""
    allocator = PageAllocator(len(free))
    allocator.release(allocator.allocate(len(free))[np.array(free)])
    if allocator.num_free == 0:
        return
    count = data.draw(st.integers(1, allocator.num_free))
    lengths = sorted(runs(np.flatnonzero(free)), reverse=True)
    fewest = int(np.searchsorted(np.cumsum(lengths), count)) + 1
    pages = allocator.allocate(count)
    assert len(runs(pages)) == fewest
    assert np.array(free)[pages].all()


class Pages(RuleBasedStateMachine):
    """Random use, against counts kept by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.references: list[list[int]] = []
        self.holds: list[list[int]] = []

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        busy = {page for pages in self.references + self.holds for page in pages}
        if count > NUM_PAGES - len(busy):
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count).tolist()
        assert len(set(pages)) == count
        assert not busy & set(pages)
        self.references.append(pages)

    @precondition(lambda self: self.references)
    @rule(data=st.data(), also_hold=st.booleans())
    def retain(self, data: st.DataObject, also_hold: bool) -> None:
        pages = data.draw(st.sampled_from(self.references))
        self.allocator.retain(np.array(pages, np.int32))
        self.references.append(list(pages))
        if also_hold:
            self.allocator.hold(np.array(pages, np.int32))
            self.holds.append(list(pages))

    @precondition(lambda self: self.references)
    @rule(data=st.data(), lists=st.integers(1, 2))
    def release(self, data: st.DataObject, lists: int) -> None:
        pages: list[int] = []
        for _ in range(min(lists, len(self.references))):
            pages += self.references.pop(data.draw(st.integers(0, len(self.references) - 1)))
        free, freed = self.allocator.num_free, self.allocator.count_freed(np.array(pages, np.int32))
        self.allocator.release(np.array(pages, np.int32))
        assert self.allocator.num_free == free + freed

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        pages = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.allocator.settle(np.array(pages, np.int32))

    @invariant()
    def counts_agree(self) -> None:
        referenced = {page for pages in self.references for page in pages}
        held = {page for pages in self.holds for page in pages}
        assert self.allocator.num_free == NUM_PAGES - len(referenced | held)
        assert self.allocator.num_draining == len(held - referenced)

    def teardown(self) -> None:
        for pages in self.references:
            self.allocator.release(np.array(pages, np.int32))
        for pages in self.holds:
            self.allocator.settle(np.array(pages, np.int32))
        assert self.allocator.allocate(NUM_PAGES).tolist() == list(range(NUM_PAGES))


def test_random_use() -> None:
    run_state_machine_as_test(Pages)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 40))
def test_numpy_picks_what_c_picks(free: list[bool], count: int) -> None:
    allocator = PageAllocator(len(free))
    allocator.release(allocator.allocate(len(free))[np.array(free)])
    if count <= allocator.num_free:
        expected = allocator._pick(count).tolist()
        assert allocator.allocate(count).tolist() == expected
        assert np.flatnonzero(allocator._free).tolist() == [
            page for page, is_free in enumerate(free) if is_free and page not in expected
        ]


def test_a_refused_release_leaves_all_counts() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(4)
    allocator.retain(pages[:2])
    allocator.hold(pages[1:3])
    before = allocator.references.tolist(), allocator.num_free, allocator.num_draining
    with pytest.raises(InvalidArgument, match="more often"):
        allocator.release(np.array([*pages, *pages], np.int32))
    with pytest.raises(InvalidArgument, match="more often"):
        allocator.settle(np.array([pages[1], pages[1]], np.int32))
    assert (allocator.references.tolist(), allocator.num_free, allocator.num_draining) == before
    allocator.release(np.array([*pages, *pages[:2]], np.int32))
    assert (allocator.num_free, allocator.num_draining) == (6, 2)
