"""The positions that FlashInfer is to attend to before token trees, on the host."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.plan.spans import span_of
from tandem.cache.plan.tables import lay_out_tokens, look_up_pages, slots_of
from tandem.cache.plan.token_tree import lay_out_trees
from tests.cache.naive_trees import draw_parents

pytest.importorskip("triton")

from tandem.cache.kernels.flashinfer.parts import all_slots, plan_parts

MAX_CONTEXT, MAX_NODES = 40, 12


@given(page_size=st.sampled_from([1, 4, 8]), window=st.integers(1, 50) | st.none(), seed=st.integers(0, 2**32))
def test_what_all_new_nodes_see_is_attended_to_but_for_a_piece_of_a_page(
    page_size: int, window: int | None, seed: int
) -> None:
    random = Random(seed)
    batch = random.randint(1, 4)
    bases = np.array([random.randint(0, MAX_CONTEXT) for _ in range(batch)])
    trees = [np.array(draw_parents(random, 0, random.randint(1, MAX_NODES))) for _ in range(batch)]
    sizes = np.array([tree.size for tree in trees])
    appends = np.array([random.randint(1, size) for size in sizes.tolist()])
    tokens = lay_out_tokens(bases + sizes - appends, appends)
    tokens = replace(tokens, trees=lay_out_trees(np.arange(batch), trees, tokens.qo_indptr))
    assert tokens.trees is not None
    places = -(-(MAX_CONTEXT + MAX_NODES) // page_size)
    table = np.random.default_rng(seed).permutation(batch * places).astype(np.int32).reshape(batch, places)
    begins = span_of(window).first_needed(bases) // page_size
    tables = look_up_pages(table, np.arange(batch), tokens, page_size, begins)
    _, (part,) = plan_parts(tokens, tables, (), page_size, torch.device("cpu"), window)
    assert part.trees is not None
    last, counts = part.kv_last_page_len.numpy(), np.diff(part.kv_indptr.numpy())
    lengths = (counts - 1) * page_size + last
    slots = np.split(all_slots(part.kv_indices.numpy(), counts, lengths, page_size), np.cumsum(lengths)[:-1])
    depths = np.split(tokens.trees.depths, np.cumsum(appends)[:-1])
    tiles = part.trees.tiles.view(-1, 6)
    for sequence, base in enumerate(bases.tolist()):
        deepest = base + int(depths[sequence].max())
        seen = 0 if window is None else max(deepest - window + 1, 0)
        first = min(-(-seen // page_size) * page_size, base)
        has_context = tiles[tiles[:, 0] == int(tokens.qo_indptr[sequence]), 5].item()
        assert has_context == (first < base)
        if has_context:
            expected = slots_of(table, sequence, np.arange(first, base), page_size)
            assert slots[sequence].tolist() == expected.tolist()
        else:
            assert slots[sequence].size == 1  # which the tree kernel does not look at
