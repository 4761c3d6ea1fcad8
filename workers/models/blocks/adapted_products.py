"""Finds the weights of a model that LoRA adapters can change, and allocates the memory of adapter slots."""

import dataclasses
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.kernels.adapter_linear import AdapterMatrices
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import (
    AttentionParameters,
    DecoderParameters,
    GatedParameters,
    LatentParameters,
    LayerParameters,
    MoeParameters,
)
from tandem.workers.models.recurrent.parameters import DeltaNetParameters, KdaParameters, Mamba2Parameters
from tandem.workers.models.weight_names import named_weights
from tandem.workers.weights.adapted import ORDER, Adapted, AdaptedPart, AdaptedWeights, AdapterRows, Ordered
from tandem.workers.weights.weight import Weight

FIELDS: dict[type, tuple[str, ...]] = {
    AttentionParameters: ("qkv", "o"),
    LatentParameters: ("down", "q_up", "o"),
    DeltaNetParameters: ("inputs", "rates", "o"),
    KdaParameters: ("inputs", "forget", "gate", "o"),
    Mamba2Parameters: ("inputs", "o"),
    GatedParameters: ("gate_up", "down"),
    MoeParameters: ("shared", "shared_gate"),
}
"""The products of a block that adapters can change. Not: a latent's second map, which is no product of its own; routed
experts, routers and indexers."""
ALIGNMENT = 64  # numbers: each matrix begins where any kernel can load many at once

Change = Callable[[Weight], Weight]


class _Sizes(NamedTuple):
    """The sizes of one weight's matrices in a slot; see AdaptedPart."""

    parts: tuple[tuple[str, Tensor], ...]  # names, and their part of the weight's order
    a: int
    b: int
    ends: tuple[int, ...]


def check_adaptable(config: ModelConfig, num_slots: int) -> None:
    """Raises UnsupportedFeature for slots of a model whose layers are not the shared decoder's."""
    if num_slots and (config.compressed is not None or config.hyper is not None or config.encoder is not None):
        raise UnsupportedFeature(
            f"adapters.max_resident is {num_slots}; for {config.architecture} it must be 0: no adapter can change it"
        )


def adapt(config: ModelConfig, parameters: DecoderParameters, num_slots: int, rank: int) -> DecoderParameters:
    """The parameters, whose products add what adapters of up to `rank` hold in num_slots slots. They are filled, and no
    decoder has taken them yet. Raises as check_adaptable()."""
    check_adaptable(config, num_slots)
    ordered = _number_rows(parameters)
    sizes, numbers = _measure(config, ordered, rank)
    device, dtype = parameters.embedding.device, config.dtype
    memory, rows = torch.zeros(num_slots, numbers, dtype=dtype, device=device), AdapterRows()
    parts, matrices = dict[str, AdaptedPart](), list[AdapterMatrices]()

    def adapted(weight: Weight) -> Weight:
        assert isinstance(weight, Ordered)
        of, count = sizes[int(weight.order[0])], len(sizes[int(weight.order[0])].parts)
        a, b = (
            memory[:, begin : begin + lines * width].unflatten(1, (lines, width))
            for begin, lines, width in ((of.a, count * rank, weight.columns), (of.b, weight.rows, rank))
        )
        ends = torch.tensor(of.ends, dtype=torch.int32, device=device)
        for index, (name, order) in enumerate(of.parts):
            begins = of.a + index * rank * weight.columns, of.b + (of.ends[index] - order.numel()) * rank
            parts[name] = AdaptedPart(name, order.numel(), weight.columns, *begins, order)
        matrices.append(AdapterMatrices(a, b, of.ends, ends))
        return Adapted(weight.base, weight.order, matrices[-1], rows)

    changed = _change(ordered, adapted)
    return dataclasses.replace(changed, adapted=AdaptedWeights(parts, memory, rank, rows, tuple(matrices)))


def _number_rows(parameters: DecoderParameters) -> DecoderParameters:
    """Each row of all weights that can be adapted has a number of its own."""
    begin = 0

    def ordered(weight: Weight) -> Weight:
        nonlocal begin
        begin += weight.rows
        return Ordered(weight, torch.arange(begin - weight.rows, begin))

    return _change(parameters, ordered)


def _measure(config: ModelConfig, parameters: DecoderParameters, rank: int) -> tuple[dict[int, _Sizes], int]:
    """Returns the sizes in a slot for each weight, by the number of its first row, and the numbers of a slot."""
    weights: list[Ordered] = []

    def collect(weight: Weight) -> Weight:
        assert isinstance(weight, Ordered)
        weights.append(weight)
        return weight

    _change(parameters, collect)
    suffix = f".{ORDER}"
    named = [(name.removesuffix(suffix), order) for name, order in named_weights(config, parameters).items()
             if name.endswith(suffix)]  # fmt: skip
    sizes, begin = dict[int, _Sizes](), 0
    for weight in weights:
        first = int(weight.order[0])
        of = range(first, first + weight.rows)
        parts = sorted(((name, order) for name, order in named if int(order[0]) in of), key=lambda one: int(one[1][0]))
        ends = tuple(accumulate(order.numel() for _, order in parts))
        assert ends[-1] == weight.rows, "its parts make up the weight"
        a, b = _aligned(begin), _aligned(_aligned(begin) + len(parts) * rank * weight.columns)
        sizes[first] = _Sizes(tuple(parts), a, b, ends)
        begin = b + weight.rows * rank
    return sizes, _aligned(begin)


def _aligned(begin: int) -> int:
    return -(-begin // ALIGNMENT) * ALIGNMENT


def _change(parameters: DecoderParameters, change: Change) -> DecoderParameters:
    """Parameters in which change() has replaced all weights that can be adapted, in their order."""
    return dataclasses.replace(parameters, layers=[_change_layer(layer, change) for layer in parameters.layers])


def _change_layer(layer: LayerParameters, change: Change) -> LayerParameters:
    beside = layer.beside
    if beside is not None:
        beside = dataclasses.replace(beside, moe=_change_block(beside.moe, change))
    return dataclasses.replace(
        layer,
        attention=_change_block(layer.attention, change),
        feed_forward=_change_block(layer.feed_forward, change),
        beside=beside,
    )


def _change_block(block: Any, change: Change) -> Any:
    if block is None:
        return None
    held = {name: getattr(block, name) for name in FIELDS.get(type(block), ())}
    changed = {
        name: _change_block(one, change) if isinstance(one, GatedParameters) else change(one)
        for name, one in held.items()
        if one is not None
    }
    return dataclasses.replace(block, **changed)
