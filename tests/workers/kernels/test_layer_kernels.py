"""The references of layer kernels and activations against formulas in float64."""

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.models.activation import ClampedSwiglu, GeluTanh, choose_activation
from tests.support.tolerances import assert_close

KERNELS = TorchLayerKernels()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_tanh(dtype: torch.dtype) -> None:
    gate_up = normal(5, 24, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    gelu = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    assert_close(GeluTanh()(gate_up), gelu * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    gate_up = normal(5, 24, dtype=dtype)
    before = gate_up.clone()
    gate, up = gate_up.double()[:, ::2].clamp(max=2), gate_up.double()[:, 1::2].clamp(-2, 2)
    activate = choose_activation(ClampedSwiglu(1.5, 2.0), KERNELS)
    assert_close(activate(gate_up), gate / (1 + torch.exp(-1.5 * gate)) * (up + 1))
    assert torch.equal(gate_up, before)


def test_a_float32_weight_multiplies_before_the_cast() -> None:
    x, weight = normal(50, 64, dtype=torch.bfloat16), 1 + normal(64) / 9
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    ours = KERNELS.add_rms_norm(x.clone(), None, weight, 1e-6)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, exact.bfloat16())
    per_head = KERNELS.norm_heads(x.view(50, 4, 16), weight.view(4, 16), 1e-6)
    rms = (x.view(50, 4, 16).double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(per_head, (x.view(50, 4, 16).double() / rms * weight.view(4, 16)).bfloat16())
