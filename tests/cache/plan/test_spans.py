"""Compares what a layer group keeps with what each query needs by the definition of its kind."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.shared import Shared
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL, Chunk, Every, Given, Paging, Span, Window, span_of
from tests.support.kinds import is_beside


def needed(span: Span, query: int) -> range:
    if span.chunk is not None:
        return range(query // span.chunk * span.chunk, query + 1)
    return range(0 if span.window is None else max(query - span.window + 1, 0), query + 1)


chunks = st.builds(Chunk, st.integers(1, 3).map(lambda pages: 16 * pages))
spans = st.just(ALL) | st.builds(Window, st.integers(1, 20)) | chunks


@given(span=spans, queries=st.lists(st.integers(0, 60), max_size=8))
def test_entries_from_the_first_needed_on_are_kept(span: Span, queries: list[int]) -> None:
    expected = [needed(span, query)[0] for query in queries]
    assert span.first_needed(np.array(queries, np.int64)).tolist() == expected
    kept = [needed(span, query // 4 * 4)[0] // 4 for query in queries]  # a prefix of full pages can be shared
    assert [span.first_page_index(query, 4) for query in queries] == kept


@given(span=spans, length=st.integers(1, 50), append=st.integers(1, 20), page_size=st.sampled_from([1, 4, 16]))
def test_no_forward_needs_more_pages_than_are_promised(span: Span, length: int, append: int, page_size: int) -> None:
    most = span.most_pages(length, append, page_size)
    for begin in range(length):
        last = min(begin + append, length) - 1
        first = needed(span, begin // page_size * page_size)[0]
        assert last // page_size - first // page_size + 1 <= most


@given(span=spans, length=st.integers(1, 50), append=st.integers(1, 20), pages=st.integers(1, 5))
def test_windows_reach_back_from_the_coarsest_page(span: Span, length: int, append: int, pages: int) -> None:
    """A prefix that ends with the coarsest page can be shared, and what that keeps was promised."""
    grain, most = 4 * pages, span.most_pages(length, append, 4, 4 * pages)
    for begin in range(length):
        first = needed(span, begin // grain * grain)[0] // 4
        assert span.first_page_index(begin, 4, grain) == first
        assert (min(begin + append, length) - 1) // 4 - first + 1 <= most


@given(positions=st.integers(2, 9), length=st.integers(0, 60), page_size=st.integers(1, 5))
def test_entries_for_several_positions_are_complete_ones(positions: int, length: int, page_size: int) -> None:
    complete = [entry for entry in range(length) if (entry + 1) * positions <= length]
    paging = Paging(positions, page_size)
    assert paging.num_entries(length) == len(complete)
    pages = len({entry // page_size for entry in complete})
    assert paging.num_pages(length) == Every(positions).most_pages(length, 1, page_size) == pages
    assert Every(positions).first_page_index(length, page_size, 60) == 0
    of_page = positions * page_size
    assert paging.padded(length) == min(whole for whole in range(0, 200, of_page) if whole >= length)


def test_pages_cover_whole_entries_and_whole_pages() -> None:
    groups = LayerGroup((0,), KV(1, 8)), *(LayerGroup((0,), Beside(1, 8, Every(m))) for m in (4, 128, 6))
    layout = KVLayout(groups, 16, torch.bfloat16)
    assert layout.paging == (Paging(1, 16), Paging(4, 4), Paging(128, 1), Paging(6, 8))
    assert (layout.pages_together, layout.grain) == ((1, 1, 8, 3), 384)
    assert layout.token_bytes == int(2 * 8 * 2 * (1 + 1 / 4 + 1 / 128 + 1 / 6))


@pytest.mark.parametrize("positions", [1, 0, 4.0, True], ids=repr)
def test_an_entry_is_for_several_positions(positions: Any) -> None:
    with pytest.raises(InvalidArgument, match="positions of an entry is "):
        Every(positions)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (LayerGroup((0,), KV(1, 8, Every(4))), "keeps of group 1 is .* but it does not stand next to others"),
        (LayerGroup((0,), KV(1, 8, Given())), "keeps of group 1 is Given"),
        (
            LayerGroup((0,), Shared(8, ALL)),
            "keeps of group 1 is All.*, with K and V in one plane; it must be a window",
        ),
        (LayerGroup((1,), Beside(1, 8)), r"with layers \[1\]; they must be some of \[0\], each once"),
        (LayerGroup((0,), Beside(1, 8, planes=3)), "planes of group 1 is 3; it must be 1 or 2"),
        (LayerGroup((0,), Beside(1, 8, top_k=3)), "top_k of group 1 is 3, but its layers have no comp"),
        (LayerGroup((0,), Beside(1, 8, Every(4), top_k=3)), "top_k of group 1 is 3, but its layers have no comp"),
    ],
)
def test_only_groups_beside_others_are_special(group: LayerGroup, message: str) -> None:
    first = replace(group, layers=(1,)) if not is_beside(group) else group
    with pytest.raises(InvalidArgument, match=message):
        KVLayout((LayerGroup((0,), KV(1, 8)), first), 4, torch.float32)


def test_only_a_window_drops_what_is_past() -> None:
    assert (span_of(None), span_of(3)) == (ALL, Window(3))
    assert (ALL.drops_past, Window(3).drops_past) == (False, True)


@pytest.mark.parametrize("size", [0, -1, 8.0, "8", True, None], ids=repr)
def test_a_window_is_of_positions(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="size of the window is "):
        Window(size)


@pytest.mark.parametrize("keeps", [8, None, "all"], ids=repr)
def test_a_group_keeps_a_span(keeps: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"keeps of group 0 is .*; it must be a Span"):
        KVLayout((LayerGroup((0,), KV(1, 8, keeps)),), 4, torch.float32)
