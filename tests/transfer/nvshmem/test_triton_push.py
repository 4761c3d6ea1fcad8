"""The push kernels against a PagePool, bit for bit: on a GPU, else in Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.copy_plan import plan_copy
from tandem.transfer.page_pool import PagePool
from tandem.transfer.regions import Region
from tests.cache.far_pages import far_pages

triton_push = pytest.importorskip(
    "tandem.transfer.nvshmem.kernels.triton_push", reason="needs triton", exc_type=ImportError
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES = 7
# num_kv_heads and head_dim that are no powers of two, pages of one and of many tiles
SHAPES = {
    "small": (LayerGroup((0, 1, 2), KV(2, 8)), 4, torch.float32),
    "odd": (LayerGroup((0, 1, 2), KV(3, 12)), 4, torch.bfloat16),
    "large": (LayerGroup((0, 1, 2), KV(8, 128)), 16, torch.bfloat16),
    "latents": (LayerGroup((0, 1, 2), Latent(576, 512)), 4, torch.bfloat16),
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def pools(request: pytest.FixtureRequest) -> list[Tensor]:
    """Two pools of random bits."""
    group, page_size, dtype = request.param
    shape = KVLayout((group,), page_size, dtype).page_shape(0)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(NUM_PAGES, *shape, generator=generator).to(DEVICE, dtype) for _ in range(2)]


def draw(count: int, below: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Distinct numbers."""
    return torch.randperm(below, generator=torch.Generator().manual_seed(seed))[:count].to(DEVICE, dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 5, 27])
def test_tokens(pools: list[Tensor], count: int, slot_dtype: torch.dtype) -> None:
    pool, (_, _, planes, heads, page_size, head_dim) = pools[0], pools[0].shape
    expected = pool.clone()
    qkv = torch.randn(30, 4 * heads * head_dim, device=DEVICE).to(pool.dtype)
    k, v = (part.view(30, heads, head_dim) for part in qkv.split(heads * head_dim, 1)[2:])  # strided by token
    v = v if planes == 2 else None
    tokens, slots = draw(count, 30, 2, torch.int64), draw(count, NUM_PAGES * page_size, 3, slot_dtype)
    triton_push.push_tokens(pool, 1, k, v, tokens, slots)
    PagePool(expected).put_tokens(1, slots.long(), k[tokens], None if v is None else v[tokens])
    assert same_bits(pool, expected)


@pytest.mark.parametrize("count", [1, 20])
def test_slots(pools: list[Tensor], count: int) -> None:
    source, target = pools
    expected = target.clone()
    slots = [draw(count, NUM_PAGES * source.shape[4], seed, torch.int32) for seed in (4, 5)]
    triton_push.push_slots(source, target, *slots)
    source_slots, target_slots = (of.long() for of in slots)
    PagePool(expected).put_slots(target_slots, PagePool(source).read_slots(source_slots))
    assert same_bits(target, expected)


@pytest.mark.parametrize(("mine", "theirs"), [(slice(0, 2), slice(1, 3)), (slice(2, 3), slice(0, 1))])
def test_heads(mine: slice, theirs: slice) -> None:
    """Some heads of all layers go between pools of unlike heads."""
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(NUM_PAGES, 3, 2, heads, 4, 12, generator=generator).to(DEVICE) for heads in (5, 3))
    region, expected = Region(slice(0, 3), mine, slice(0, 3), theirs), target.clone()
    pages = [draw(4, NUM_PAGES, seed, torch.int32) for seed in (4, 5)]
    triton_push.push_heads(source, target, *pages, region)
    froms, tos = (of.long() for of in pages)
    expected[tos, :, :, theirs] = source[froms][:, :, :, mine]
    assert same_bits(target, expected)


WHOLE = Region(slice(0, 2), slice(1, 3), slice(0, 2), slice(0, 2))
NUMBERS = Region(
    slice(0, 2), slice(0, 1), slice(0, 2), slice(0, 1), (slice(0, 3), slice(7, 9)), (slice(2, 5), slice(0, 2))
)


@pytest.mark.parametrize(
    ("region", "heads", "sizes"), [(WHOLE, (3, 2), (6, 6)), (NUMBERS, (1, 1), (9, 5))], ids=["heads", "numbers"]
)
def test_regions_of_unlike_shards(region: Region, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    """Heads, or numbers of the only head, as ranks divide states. Whole pages and single slots go as PagePool's."""
    shard_pages = pytest.importorskip("tandem.transfer.nvshmem.shard_pages", exc_type=ImportError)
    generator = torch.Generator().manual_seed(1)
    source, target = (
        torch.randn(NUM_PAGES, 2, 1, count, 2, size, generator=generator).to(DEVICE)
        for count, size in zip(heads, sizes, strict=True)
    )
    slots = np.array([0, 1, 4, 5, 6, 7, 9], np.int32), np.array([8, 9, 2, 3, 4, 5, 12], np.int32)
    plan, expected = plan_copy(*slots, 2, 2 * NUM_PAGES), target.clone()
    assert plan.num_pages.sum() == 3
    stream = torch.cuda.current_stream() if DEVICE == "cuda" else None
    shard_pages.copy_region(source, target, plan, region, stream)
    PagePool(expected).copy(PagePool(source), plan, region)
    assert same_bits(target, expected)


@pytest.mark.parametrize("pools", [SHAPES["odd"], SHAPES["latents"]], indirect=True, ids=["odd", "latents"])
def test_far_pages(pools: list[Tensor]) -> None:
    near, source = pools
    (far, first), (far_source, first_source) = far_pages(near), far_pages(source)
    _, _, planes, heads, page_size, head_dim = near.shape
    tokens, slots = draw(4, 30, 2, torch.int64), draw(8, NUM_PAGES * page_size, 3, torch.int32)
    k, v = torch.randn(2, 30, heads, head_dim, device=DEVICE).to(near.dtype)
    for pool, begin in ((near, 0), (far, first)):
        own = slots + begin * page_size
        triton_push.push_tokens(pool, 1, k, v if planes == 2 else None, tokens, own[:4])
    triton_push.push_slots(source, near, slots[:4], slots[4:])
    triton_push.push_slots(far_source, far, slots[:4] + first_source * page_size, slots[4:] + first * page_size)
    assert same_bits(far[first:], near)


@pytest.mark.parametrize(("signal", "payload"), [(0, 0), (1, -1), (2**62 + 1, 16), (5, -(2**40))])
def test_rows(signal: int, payload: int) -> None:
    mailbox = torch.arange(8, device=DEVICE).view(2, 4)
    expected = mailbox.clone()
    word = torch.tensor(payload, device=DEVICE)
    triton_push.post_row(mailbox, 2, signal, word)
    expected[0, 2], expected[1, 2] = signal, payload
    assert torch.equal(mailbox, expected)
