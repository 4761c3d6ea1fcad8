"""What the GPU kernels refuse; what they compute is tested in tests/gpu."""

import pytest
import torch

from tandem.cache.errors import InvalidArgument

pytest.importorskip("triton")

from tandem.cache.kernels.flashinfer_kernels import FlashInferKernels


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "message"),
    [
        (torch.float32, 128, 16, "dtype is torch.float32; .* torch.float16, torch.bfloat16"),
        (torch.bfloat16, 96, 16, "head_dim is 96; .* 64, 128, 256"),
        (torch.bfloat16, 128, 128, "page_size is 128; .* 8, 16, 32, 64"),
        (torch.bfloat16, 128, 16, "the pool is on cpu"),
    ],
)
def test_refused(dtype: torch.dtype, head_dim: int, page_size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        FlashInferKernels(torch.empty(1, 1, 2, 1, page_size, head_dim, dtype=dtype), 1.0)
