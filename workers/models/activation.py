"""The activations between the two GEMMs of a feed-forward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.kernels.base import LayerKernels
from tandem.workers.kernels.torch.activations import clamped_swiglu, gelu_tanh_mul

Activate = Callable[[Tensor], Tensor]
"""[n, 2·I], the gate and up projections, → [n, I]."""


@dataclass(frozen=True)
class Silu:
    """silu(gate) · up, gate first."""

    def bind(self, kernels: LayerKernels) -> Activate:
        return kernels.silu_mul


@dataclass(frozen=True)
class GeluTanh:
    """gelu(gate) · up with the tanh approximation, gate first."""

    def bind(self, kernels: LayerKernels) -> Activate:
        return gelu_tanh_mul


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate · sigmoid(alpha · gate) · (up + 1), of gpt_oss. Gate and up alternate, and are clamped at limit."""

    alpha: float
    limit: float

    def bind(self, kernels: LayerKernels) -> Activate:
        return partial(clamped_swiglu, alpha=self.alpha, limit=self.limit)


Activation = Silu | GeluTanh | ClampedSwiglu
NAMES: dict[str, Activation] = {"silu": Silu(), "swish": Silu(), "gelu_pytorch_tanh": GeluTanh()}


def read_activation(fields: Fields, name: str, default: str) -> Activation:
    """Field `name`; UnsupportedFeature for one that is not implemented."""
    value = fields.text(name, default)
    if value not in NAMES:
        raise UnsupportedFeature(f"{fields.source}: {name} is {value!r}; only {', '.join(NAMES)} are implemented")
    return NAMES[value]
