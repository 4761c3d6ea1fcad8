"""The digest is of what is stored, wherever its pages are, and notices every bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache import digest
from tandem.cache.digest import DIGEST_BITS, digest_kv
from tandem.cache.kernels.recurrent import StateShape
from tandem.cache.kinds.kv import KV
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import SKIP
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.shard import WHOLE, Shard
from tests.cache.naive import cache_of, draw_inputs, layout_of, pools_of, run, windowed
from tests.cache.peer_writer import PeerWriter
from tests.support.state_parts import DELTA, SSD, part_of_pools
from tests.support.state_parts import layout_of as layout_of_states

PAGE, LENGTH = 4, 22
SEQUENCE = 7


class Stored:
    """One sequence of LENGTH positions, `lead` pages into the pool."""

    def __init__(self, dtype: torch.dtype, lead: int = 0) -> None:
        layout = KVLayout((LayerGroup((0, 2), KV(2, 8)), LayerGroup((1,), KV(1, 8))), PAGE, dtype)
        self.pools = [torch.zeros(16, *layout.page_shape(group), dtype=dtype) for group in range(2)]
        self.cache = PagedKVCache(
            layout, self.pools, max_sequences=4, max_sequence_length=64, rope=RopeParameters("none", 8), writer=None
        )
        if lead:
            self.cache.add_sequence(1)
            self.cache.reserve(1, lead * PAGE)
        self.cache.add_sequence(SEQUENCE)
        runs = self.cache.prepare_receive(SEQUENCE, LENGTH).runs
        self.slots = [torch.from_numpy(group.slots()).long() for group in runs]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for pool, slots in zip(self.pools, self.slots, strict=True):
            layers, _, heads, _, dim = pool.shape[1:]
            values = torch.randn(LENGTH, layers, 2, heads, dim, generator=generator).to(pool.dtype)
            pool[slots // PAGE, :, :, :, slots % PAGE] = values

    def bits(self, group: int, position: int) -> np.ndarray:
        """A view of the position's KV that is written through: uint8."""
        slot = int(self.slots[group][position])
        return self.pools[group][slot // PAGE, :, :, :, slot % PAGE].view(torch.uint8).numpy()

    def digest(self, begin: int = 0) -> int:
        return digest_kv(self.cache, SEQUENCE, begin, LENGTH)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def test_equal_wherever_the_pages_are_and_however_it_is_read(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Stored(dtype), Stored(dtype, lead=3)
    one.fill(0)
    other.fill(0)
    for pool in other.pools:
        pool[:3] = 5  # what is stored beside does not count
    assert not torch.equal(one.slots[0], other.slots[0])
    assert 0 <= one.digest() < 1 << DIGEST_BITS
    assert one.digest() == other.digest()
    monkeypatch.setattr(digest, "POSITIONS_AT_A_TIME", 5)
    assert one.digest(3) == other.digest(3) != one.digest()


def test_nan_and_zeros_of_both_signs_are_bits_too(dtype: torch.dtype) -> None:
    stored = Stored(dtype)
    stored.pools[0].fill_(float("nan"))
    before = stored.digest()
    assert stored.digest() == before
    stored.pools[0].zero_()
    zeros = stored.digest()
    stored.pools[0].neg_()
    assert len({before, zeros, stored.digest()}) == 3


@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 1), st.integers(0, LENGTH - 1), st.data())
def test_one_bit_changes_it(dtype: torch.dtype, group: int, position: int, data: st.DataObject) -> None:
    stored = Stored(dtype)
    stored.fill(1)
    before = stored.digest()
    bits = stored.bits(group, position)
    index = tuple(data.draw(st.integers(0, extent - 1)) for extent in bits.shape)
    bits[index] ^= 1 << data.draw(st.integers(0, 7))
    assert stored.digest() != before


@given(st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1), st.integers(0, 1))
def test_positions_that_changed_places_change_it(one: int, other: int, group: int) -> None:
    stored = Stored(torch.float32)
    stored.fill(2)
    before = stored.digest()
    first, second = stored.bits(group, one).copy(), stored.bits(group, other).copy()
    stored.bits(group, one)[:], stored.bits(group, other)[:] = second, first
    assert (stored.digest() == before) == (one == other)


def test_with_windows_it_is_of_what_a_later_query_sees() -> None:
    """The sender, in chunks, still holds some that the receiver never gets; of what it gets every bit counts."""
    layout = windowed(layout_of(1, 2), None, 6)
    pools = [pools_of(layout, 16) for _ in range(2)]
    sender, receiver = (cache_of(layout, pools=own, writer=PeerWriter(pe, pools)) for pe, own in enumerate(pools))
    for cache in (sender, receiver):
        cache.add_sequence(SEQUENCE)
    position_map = receiver.prepare_receive(SEQUENCE, LENGTH)
    sender.mark_send(SEQUENCE, 0, position_map, 1)
    inputs = draw_inputs(layout, LENGTH, seed=0)
    for begin, end in ((0, 9), (9, 16), (16, LENGTH)):
        run(sender, [SEQUENCE], [end - begin], inputs.between(begin, end))
    sent = digest_kv(sender, SEQUENCE, 0, LENGTH)
    assert digest_kv(receiver, SEQUENCE, 0, LENGTH) == sent
    for pool, runs in zip(pools[1], position_map.runs, strict=True):
        wanted = [slot for slot in runs.slots().tolist() if slot != SKIP]
        for slot in wanted:
            entry = pool[slot // PAGE, -1, 1, -1, slot % PAGE]
            entry.neg_()
            assert digest_kv(receiver, SEQUENCE, 0, LENGTH) != sent
            entry.neg_()


@pytest.mark.parametrize("shape", [DELTA, SSD], ids=["delta", "ssd"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_model_with_states_get_the_digest_of_one(shape: StateShape, size: int) -> None:
    """Numbers that several ranks hold count once, and each rank's part counts."""
    generator = torch.Generator().manual_seed(4)
    layout = layout_of_states(shape, WHOLE, PAGE)
    whole = [torch.randn(8, *layout.page_shape(group), generator=generator) for group in range(2)]
    words: list[int] = []
    due = digest_of_states(shape, WHOLE, whole, words)
    (of_all,) = words
    words.clear()
    for rank in range(size):
        digest_of_states(shape, Shard(rank, size), whole, words)
    assert sum(words) % (1 << 64) == of_all
    assert due == of_all >> 32 & (1 << DIGEST_BITS) - 1
    whole[1][..., -1] *= -1  # of the last head
    *first, last = words
    digest_of_states(shape, Shard(size - 1, size), whole, words)
    assert words[-1] != last
    digest_of_states(shape, Shard(0, size), whole, words)
    assert words[-1] == first[0]


def digest_of_states(shape: StateShape, shard: Shard, whole: list[torch.Tensor], words: list[int]) -> int:
    """words: gets what the rank adds to the digest. The sequence takes the first pages."""
    layout, pools = (
        layout_of_states(shape, shard, PAGE),
        [one.contiguous() for one in part_of_pools(whole, shape, shard)],
    )
    ropes = [RopeParameters("none", 4), RopeParameters("none", 0)]
    cache = PagedKVCache(layout, pools, max_sequences=1, max_sequence_length=64, rope=ropes, writer=None)
    cache.add_sequence(SEQUENCE)
    cache.prepare_receive(SEQUENCE, LENGTH)

    def keep(word: int) -> int:
        words.append(word)
        return word

    return digest_kv(cache, SEQUENCE, 0, LENGTH, add_up=keep)
