"""The tensors of a gated delta rule, and their names in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.models.recurrent.fields import RecurrentConfig
from tandem.workers.weights.allocator import Allocator
from tandem.workers.weights.weight import Weight, split_weights


@dataclass(frozen=True, slots=True)
class RecurrentParameters:
    """Hv value heads of Dv; C channels of q, k and v of all heads."""

    inputs: Weight  # [C + Hv·Dv, H]: q, k, v, and the gates z of the output
    rates: Weight  # [2·Hv, H]: b, of which beta is made, then a, of which the decay is made
    conv: Tensor  # [C, 1, taps]
    decay: Tensor  # float32 [Hv], A_log
    decay_bias: Tensor  # float32 [Hv], dt_bias
    norm: Tensor  # [Dv], of a head's output
    o: Weight  # [H, Hv·Dv]


def allocate_recurrent(config: RecurrentConfig, hidden: int, new: Allocator) -> RecurrentParameters:
    shape, exact = config.shape, Allocator(torch.float32, new.device)
    values = shape.value_heads * shape.value_dim
    return RecurrentParameters(
        inputs=new.linear(shape.channels + values, hidden),
        rates=new.linear(2 * shape.value_heads, hidden),
        conv=new(shape.channels, 1, shape.tail + 1),
        decay=exact(shape.value_heads),
        decay_bias=exact(shape.value_heads),
        norm=new(shape.value_dim),
        o=new.linear(hidden, values),
    )


def recurrent_weights(config: RecurrentConfig, parameters: RecurrentParameters, prefix: str) -> dict[str, Tensor]:
    """Those of one layer."""
    shape = config.shape
    values = shape.value_heads * shape.value_dim
    inputs = (("in_proj_qkvz", shape.channels + values),)
    rates = (("in_proj_ba", 2 * shape.value_heads),)
    if not config.by_key_head:
        inputs = ("in_proj_qkv", shape.channels), ("in_proj_z", values)
        rates = ("in_proj_b", shape.value_heads), ("in_proj_a", shape.value_heads)
    return {
        **split_weights(prefix, parameters.inputs, inputs),
        **split_weights(prefix, parameters.rates, rates),
        f"{prefix}.conv1d.weight": parameters.conv,
        f"{prefix}.A_log": parameters.decay,
        f"{prefix}.dt_bias": parameters.decay_bias,
        f"{prefix}.norm.weight": parameters.norm,
        **parameters.o.named(f"{prefix}.out_proj"),
    }
