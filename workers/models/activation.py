"""The activations between the two GEMMs of a feed-forward."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.shared_fields import GATED, read_activation_name
from tandem.workers.kernels.base import LayerKernels

Activate = Callable[[Tensor], Tensor]
"""[n, 2·I], the gate and up projections, → [n, I]; without a gate [n, I] → [n, I]."""


@dataclass(frozen=True)
class Silu:
    """silu(gate) · up, gate first: LayerKernels.silu_mul."""


@dataclass(frozen=True)
class GeluTanh:
    """gelu(gate) · up with the tanh approximation, gate first."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True)
class ClampedSwiglu:
    """gate · sigmoid(alpha · gate) · (up + 1), of gpt_oss: LayerKernels.clamped_swiglu."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class LimitedSilu:
    """silu(gate) · up, gate first. Before that gate is clamped to at most limit, and up to -limit … limit."""

    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)).mul_(up.clamp(-self.limit, self.limit))


@dataclass(frozen=True)
class SquaredRelu:
    """relu(up)², of Nemotron: no gate."""

    def __call__(self, up: Tensor) -> Tensor:
        return up.relu().square_()


Activation = Silu | GeluTanh | ClampedSwiglu | LimitedSilu | SquaredRelu
NAMES: dict[str, Activation] = dict(zip(GATED, (Silu(), Silu(), GeluTanh()), strict=True))
UNGATED: dict[str, Activation] = {"relu2": SquaredRelu()}


def is_gated(activation: Activation) -> bool:
    """Whether a feed-forward has a gate next to up."""
    return activation not in UNGATED.values()


def choose_activation(activation: Activation, kernels: LayerKernels) -> Activate:
    if isinstance(activation, ClampedSwiglu):
        return partial(kernels.clamped_swiglu, alpha=activation.alpha, limit=activation.limit)
    return kernels.silu_mul if isinstance(activation, Silu) else activation


def read_activation(fields: Fields, name: str, default: str) -> Activation:
    """Field `name`, one with a gate unless the default has none; UnsupportedFeature for one that is not implemented."""
    known = UNGATED if default in UNGATED else NAMES
    return known[read_activation_name(fields, name, default, known)]
