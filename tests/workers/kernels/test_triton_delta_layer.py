"""DeltaKernels in Triton against torch: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.torch.delta import TorchDelta
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.workers.kernels.triton.delta import TritonDelta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (1, 3)
TOKENS, HEADS, HEAD_DIM = 4, 9, 20


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rates(dtype: torch.dtype, groups: int) -> None:
    """Also where softplus is next to nothing, and where it is the number itself; rows lie apart."""
    both = draw(TOKENS, groups, 2, HEADS // groups, dtype=dtype)
    both[0, 0, 1, :3] = torch.tensor([-25.0, -18.0, 60.0])
    b, a = both.unbind(2)
    decay, bias = -draw(HEADS, seed=1).abs(), draw(HEADS, seed=2)
    found, expected = (kernels.rates(b, a, decay, bias) for kernels in (TritonDelta(), TorchDelta()))
    assert {rate.dtype for rate in (*found, *expected)} == {torch.float32}
    assert_close(found[0], expected[0])
    assert_close(found[1].to(dtype), expected[1].to(dtype))
    exact = decay.double() * torch.nn.functional.softplus(a.flatten(1).double() + bias)
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(dtype: torch.dtype, groups: int) -> None:
    o, weight = draw(TOKENS, HEADS, HEAD_DIM, dtype=dtype), draw(HEAD_DIM, dtype=dtype, seed=1)
    z = draw(TOKENS, groups, HEADS // groups * HEAD_DIM + 5, dtype=dtype, seed=2)[:, :, 5:]
    found, expected = (kernels.gate(o, z, weight, 1e-3) for kernels in (TritonDelta(), TorchDelta()))
    assert found.shape == (TOKENS, HEADS * HEAD_DIM)
    assert_close(found, expected)
