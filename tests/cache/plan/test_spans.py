"""What a layer group keeps, against what each query needs by the definition of its kind."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.spans import ALL, Chunk, Span, Window, span_of


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


def test_only_a_window_drops_what_is_past() -> None:
    assert (span_of(None), span_of(3)) == (ALL, Window(3))
    assert (ALL.drops_past, Window(3).drops_past) == (False, True)


@pytest.mark.parametrize("size", [0, -1, 8.0, "8", True, None], ids=repr)
def test_a_window_is_of_positions(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="size of the window is "):
        Window(size)


@pytest.mark.parametrize("keeps", [8, None, "all"], ids=repr)
def test_a_group_keeps_a_span(keeps: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"keeps of group 0 is .*; a Span is accepted"):
        KVLayout((LayerGroup((0,), 1, 8, keeps),), 4, torch.float32)
