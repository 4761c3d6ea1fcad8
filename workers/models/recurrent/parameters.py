"""The tensors of recurrent layers, and their names in a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.models.recurrent.fields import DeltaNetConfig, KdaConfig, Mamba2Config, RecurrentConfig
from tandem.workers.weights.allocator import Allocator
from tandem.workers.weights.weight import Weight, split_weights


@dataclass(frozen=True, slots=True)
class RecurrentParameters:
    """Hv heads each read Dv numbers from their states; C channels of the convolution."""

    inputs: Weight  # the first product, of H columns
    conv: Tensor  # [C, 1, taps]
    decay: Tensor  # float32 [Hv], A_log; [1, 1, Hv, 1] with decays for rows
    decay_bias: Tensor  # float32 [Hv], dt_bias; [Hv·Dv] with decays for rows
    norm: Tensor  # of the output
    o: Weight  # [H, Hv·Dv]


@dataclass(frozen=True, slots=True)
class DeltaNetParameters(RecurrentParameters):
    """inputs [C + Hv·Dv, H]: q, k, v, and the gates z of the output. norm [Dv]: of a head's output."""

    rates: Weight  # [2·Hv, H]: b, of which beta is made, then a, of which the decay is made


@dataclass(frozen=True, slots=True)
class KdaParameters(RecurrentParameters):
    """inputs [C + 2·Dv + Hv, H]: q, k, v, then what decays, gates and beta are made of. norm [Dv]."""

    forget: Weight  # [Hv·Dv, Dv]: of the decays
    gate: Weight  # [Hv·Dv, Dv]: of the output's gates


@dataclass(frozen=True, slots=True)
class Mamba2Parameters(RecurrentParameters):
    """inputs [Hv·Dv + C + Hv, H]: the gates z of the output, then x, B and C, then what Δ is made of. norm [Hv·Dv]."""

    conv_bias: Tensor | None  # [C]
    skip: Tensor  # float32 [Hv], D


def allocate_recurrent(config: RecurrentConfig, hidden: int, new: Allocator) -> RecurrentParameters:
    if isinstance(config, Mamba2Config):
        return _allocate_mamba2(config, hidden, new)
    if isinstance(config, KdaConfig):
        return _allocate_kda(config, hidden, new)
    assert isinstance(config, DeltaNetConfig)  # there are no others
    return _allocate_delta_net(config, hidden, new)


def _allocate_mamba2(config: Mamba2Config, hidden: int, new: Allocator) -> Mamba2Parameters:
    shape, exact = config.shape, Allocator(torch.float32, new.device)
    values = shape.heads * shape.output_dim
    return Mamba2Parameters(
        inputs=new.linear(values + shape.channels + shape.heads, hidden, biased=config.biased),
        conv=new(shape.channels, 1, shape.tail + 1),
        conv_bias=new.when(config.conv_biased, shape.channels),
        decay=exact(shape.heads),
        decay_bias=exact(shape.heads),
        skip=exact(shape.heads),
        norm=new(values),
        o=new.linear(hidden, values, biased=config.biased),
    )


def _allocate_kda(config: KdaConfig, hidden: int, new: Allocator) -> KdaParameters:
    shape, exact = config.shape, Allocator(torch.float32, new.device)
    values = shape.heads * shape.output_dim
    return KdaParameters(
        inputs=new.linear(shape.channels + 2 * shape.output_dim + shape.heads, hidden),
        conv=new(shape.channels, 1, shape.tail + 1),
        decay=exact(1, 1, shape.heads, 1),
        decay_bias=exact(values),
        forget=new.linear(values, shape.output_dim),
        gate=new.linear(values, shape.output_dim),
        norm=new(shape.output_dim),
        o=new.linear(hidden, values),
    )


def _allocate_delta_net(config: DeltaNetConfig, hidden: int, new: Allocator) -> DeltaNetParameters:
    shape, exact = config.shape, Allocator(torch.float32, new.device)
    values = shape.value_heads * shape.value_dim
    return DeltaNetParameters(
        inputs=new.linear(shape.channels + values, hidden),
        rates=new.linear(2 * shape.value_heads, hidden),
        conv=new(shape.channels, 1, shape.tail + 1),
        decay=exact(shape.value_heads),
        decay_bias=exact(shape.value_heads),
        norm=new(shape.value_dim),
        o=new.linear(hidden, values),
    )


def recurrent_weights(config: RecurrentConfig, parameters: RecurrentParameters, prefix: str) -> dict[str, Tensor]:
    """Returns the weights of one layer by name."""
    if isinstance(parameters, KdaParameters):
        return _kda_weights(parameters, prefix)
    shared = {
        f"{prefix}.conv1d.weight": parameters.conv,
        f"{prefix}.A_log": parameters.decay,
        f"{prefix}.dt_bias": parameters.decay_bias,
        f"{prefix}.norm.weight": parameters.norm,
        **parameters.o.named(f"{prefix}.out_proj"),
    }
    if isinstance(parameters, Mamba2Parameters):
        bias = {} if parameters.conv_bias is None else {f"{prefix}.conv1d.bias": parameters.conv_bias}
        return parameters.inputs.named(f"{prefix}.in_proj") | shared | bias | {f"{prefix}.D": parameters.skip}
    assert isinstance(config, DeltaNetConfig)
    assert isinstance(parameters, DeltaNetParameters)
    return _delta_net_products(config, parameters, prefix) | shared


def _kda_weights(parameters: KdaParameters, prefix: str) -> dict[str, Tensor]:
    rows, rank = parameters.o.columns, parameters.forget.columns
    heads = parameters.decay.numel()
    firsts = (*((f"{one}_proj", rows) for one in "qkv"), ("f_a_proj", rank), ("g_a_proj", rank), ("b_proj", heads))
    convs = zip("qkv", parameters.conv.split(rows), strict=True)
    return {
        **split_weights(prefix, parameters.inputs, firsts),
        **{f"{prefix}.{one}_conv1d.weight": conv for one, conv in convs},
        f"{prefix}.A_log": parameters.decay,
        f"{prefix}.dt_bias": parameters.decay_bias,
        **parameters.forget.named(f"{prefix}.f_b_proj"),
        **parameters.gate.named(f"{prefix}.g_b_proj"),
        f"{prefix}.o_norm.weight": parameters.norm,
        **parameters.o.named(f"{prefix}.o_proj"),
    }


def _delta_net_products(config: DeltaNetConfig, parameters: DeltaNetParameters, prefix: str) -> dict[str, Tensor]:
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
    }
