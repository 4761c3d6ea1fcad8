import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.layout import KVLayout
from tests.cache.naive import cache_of, draw_inputs, layout_of, run
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2)
TOKENS = list(range(100, 160))


def prefilled(
    cache: TvmCache, sequence: int, tokens: list[int], *, layout: KVLayout = LAYOUT, publish: bool = True
) -> int:
    """Serves a prompt as a worker does; the length it found in the index. Its KV is a function of its tokens."""
    cache.add_sequence(sequence)
    matched = cache.match_prefix(sequence, tokens)
    inputs = draw_inputs(layout, len(tokens), seed=sum(tokens))
    for q, k, v in inputs.layers:
        for x in (q, k, v):
            x.copy_(torch.tensor(tokens, dtype=x.dtype)[:, None, None].expand(x.shape))
    inputs.layers = [(q[matched:], k[matched:], v[matched:]) for q, k, v in inputs.layers]
    run(cache, [sequence], [len(tokens) - matched], inputs)
    if publish:
        cache.publish_prefix(sequence, tokens)
    return matched


@pytest.mark.parametrize("layout", [LAYOUT, layout_of(1, 4)], ids=["one group", "two groups"])
def test_a_prompt_served_before_is_found_in_full_pages(layout: KVLayout) -> None:
    cache = cache_of(layout, num_pages=32)
    assert prefilled(cache, 0, TOKENS[:14], layout=layout) == 0
    assert cache.num_cached_pages == 3
    assert prefilled(cache, 1, TOKENS[:20], layout=layout) == 12
    assert cache.num_pages - cache.num_free_pages == 4 + 2
    for (k, v), (shared_k, shared_v) in zip(cache.gather_kv(0, 0, 14), cache.gather_kv(1, 0, 14), strict=True):
        assert torch.equal(k, shared_k)
        assert torch.equal(v, shared_v)


def test_one_token_is_always_left() -> None:
    cache = cache_of(LAYOUT)
    prefilled(cache, 0, TOKENS[:12])
    assert prefilled(cache, 1, TOKENS[:12]) == 8
    assert prefilled(cache, 2, TOKENS[:13]) == 12
    cache.add_sequence(3)
    assert cache.match_prefix(3, []) == 0
    assert cache.match_prefix(3, TOKENS[:4]) == 0


def test_other_tokens_before_a_page_make_it_another() -> None:
    cache = cache_of(LAYOUT)
    prefilled(cache, 0, TOKENS[:12])
    assert prefilled(cache, 1, [1, *TOKENS[1:12]]) == 0
    assert prefilled(cache, 2, [*TOKENS[:5], 1, *TOKENS[6:12]]) == 4


def test_pages_of_two_prompts_are_no_prefix_of_a_third() -> None:
    """Its second page would have KV that was computed after other tokens."""
    cache = cache_of(LAYOUT, num_pages=32)
    prefilled(cache, 0, TOKENS[:12])
    prefilled(cache, 1, TOKENS[12:24])
    assert prefilled(cache, 2, [*TOKENS[:4], *TOKENS[16:24]]) == 4


def test_pages_stay_when_their_sequence_goes_and_count_as_free() -> None:
    cache = cache_of(LAYOUT, num_pages=4)
    prefilled(cache, 0, TOKENS[:13])
    assert cache.num_free_pages == 0
    cache.remove_sequence(0)
    assert (cache.num_free_pages, cache.num_cached_pages) == (4, 3)
    assert prefilled(cache, 1, TOKENS[:13]) == 12
    cache.remove_sequence(1)
    cache.clear_prefixes()
    assert (cache.num_free_pages, cache.num_cached_pages) == (4, 0)
    assert prefilled(cache, 2, TOKENS[:13]) == 0


def test_an_index_page_is_not_written_when_its_sequence_pops_into_it() -> None:
    cache = cache_of(LAYOUT)
    prefilled(cache, 0, TOKENS[:8])
    cache.pop(0, 2)
    run(cache, [0], [2], draw_inputs(LAYOUT, 2, seed=5))
    assert prefilled(cache, 1, TOKENS[:9], publish=False) == 8
    for _, v in cache.gather_kv(1, 0, 8):
        assert v[:, 0, 0].tolist() == TOKENS[:8]


def test_the_least_recently_used_leaf_gives_way() -> None:
    cache = cache_of(LAYOUT, num_pages=6)
    prefilled(cache, 0, TOKENS[:8])
    cache.remove_sequence(0)
    prefilled(cache, 1, [7] * 8)
    cache.remove_sequence(1)
    prefilled(cache, 2, TOKENS[:9], publish=False)
    cache.remove_sequence(2)  # TOKENS were used last, though published first
    prefilled(cache, 3, [5] * 9, publish=False)
    cache.remove_sequence(3)
    assert cache.num_cached_pages == 3
    cache.add_sequence(4)
    assert cache.match_prefix(4, [7] * 9) == 4  # its second page went, not its first
    cache.add_sequence(5)
    assert cache.match_prefix(5, TOKENS[:9]) == 8


def test_pages_in_use_do_not_give_way() -> None:
    cache = cache_of(LAYOUT, num_pages=4)
    prefilled(cache, 0, TOKENS[:8])
    cache.add_sequence(1)
    with pytest.raises(OutOfPages, match="3 pages needed, 2 free"):
        cache.begin_forward([1], [9])
    assert cache.num_cached_pages == 2
    cache.remove_sequence(0)
    run(cache, [1], [9], draw_inputs(LAYOUT, 9, seed=0))
    assert cache.num_cached_pages == 1


def test_a_prompt_published_twice_is_kept_once() -> None:
    cache = cache_of(LAYOUT)
    for sequence in (0, 1):
        cache.add_sequence(sequence)
        run(cache, [sequence], [9], draw_inputs(LAYOUT, 9, seed=0))
        cache.publish_prefix(sequence, TOKENS[:9])
    assert cache.num_cached_pages == 2
    cache.publish_prefix(0, TOKENS[:9])
    for sequence in (0, 1):
        cache.remove_sequence(sequence)
    assert cache.num_free_pages == cache.num_pages
    cache.clear_prefixes()
    assert cache.num_free_pages == cache.num_pages


def test_wrong_use_is_refused() -> None:
    cache = cache_of(LAYOUT)
    prefilled(cache, 0, TOKENS[:8])
    with pytest.raises(InvalidArgument, match="only an empty one can take a prefix"):
        cache.match_prefix(0, TOKENS)
    with pytest.raises(InvalidArgument, match="token_ids has 9 tokens; sequence 0 holds 8"):
        cache.publish_prefix(0, TOKENS[:9])
    with pytest.raises(InvalidArgument, match="token_ids differ"):
        cache.publish_prefix(0, TOKENS[1:9])
    assert cache.num_cached_pages == 2
