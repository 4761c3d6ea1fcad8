"""Gathered K and V, or latents, against indexing: on a GPU, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tandem.cache.kernels.triton.gather import gather
from tandem.cache.plan.kv_scales import FP8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("planes", "heads", "page_size", "head_dim"), [(2, 2, 4, 16), (2, 1, 1, 24), (2, 3, 8, 64), (1, 1, 4, 72)]
)
def test_gather(dtype: torch.dtype, planes: int, heads: int, page_size: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(5, 3, planes, heads, page_size, head_dim, generator=generator).to(DEVICE, dtype)
    slots = torch.randint(5 * page_size, (11,), generator=generator, dtype=torch.int32).to(DEVICE)
    for layer in range(3):
        expected = pool[slots // page_size, layer, :, :, slots % page_size]
        assert torch.equal(gather(pool, layer, slots), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fp8_entries_are_widened(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(5, 3, 2, 3, 8, 16, generator=generator).to(FP8).to(DEVICE)
    slots = torch.randint(5 * 8, (11,), generator=generator, dtype=torch.int32).to(DEVICE)
    scales = torch.rand(2, 3, generator=generator).to(DEVICE)
    entries = pool.float()[slots // 8, 1, :, :, slots % 8]
    assert torch.equal(gather(pool, 1, slots, dtype, scales), (entries * scales[..., None]).to(dtype))
