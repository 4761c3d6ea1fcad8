"""Computes the least that a decode step of one rank reads, by its shard's config, and how often its ranks add up."""

import torch

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.recurrent.parameters import allocate_recurrent, recurrent_weights
from tandem.workers.weights.allocator import Allocator
from tandem.workers.weights.formats.mxfp4 import GROUP
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.spans import kv_bytes

SUMS_A_LAYER = 2  # behind attention, and behind the feed-forward or the experts


def num_sums(config: ModelConfig) -> int:
    """Sums of [tokens, hidden_size] in a forward of a worker of several ranks."""
    return SUMS_A_LAYER * config.num_layers


def weight_bytes(config: ModelConfig, rows: int) -> float:
    """Returns the bytes of the matrices that a step of `rows` tokens multiplies by. Experts: as many as even choices
    make on average.

    Matrices have the dtype of the config, or experts MXFP4. Norms, biases and sinks are left out.
    """
    hidden, moe = config.hidden_size, config.moe
    numbers = float(len(config.head_part) * hidden)
    for layer, span in enumerate(config.layer_spans):
        heads = sum(config.qkv_heads(layer)) + config.num_heads
        numbers += recurrent_numbers(config) if span.last else heads * config.head_dim * hidden
        if moe is None or layer not in moe.layers:
            numbers += 3 * hidden * config.intermediate_size
    dense = numbers * config.dtype.itemsize
    if moe is None:
        return dense
    whole = moe.num_experts + 3 * moe.shared_size + (moe.names.shared_gate is not None)  # the router, and what all take
    chosen = len(config.experts) * (1 - (1 - moe.routing.top_k / moe.num_experts) ** rows)
    expert = 3 * hidden * moe.intermediate_size * expert_itemsize(config)
    return dense + len(moe.layers) * (whole * hidden * config.dtype.itemsize + chosen * expert)


def recurrent_numbers(config: ModelConfig) -> int:
    """Returns the numbers in the matrices of a layer that keeps a state, and of its convolution."""
    assert config.recurrent is not None
    parameters = allocate_recurrent(config.recurrent, config.hidden_size, Allocator(config.dtype, torch.device("meta")))
    weights = recurrent_weights(config.recurrent, parameters, "").values()
    return sum(weight.numel() for weight in weights if weight.dim() > 1)


def kept_bytes(config: ModelConfig, lengths: Lengths) -> int:
    """Returns the bytes of KV that a decode step reads, and of states that it reads and writes. lengths: int64 [rows],
    positions stored."""
    recurrent = config.recurrent
    states = 0 if recurrent is None else 2 * lengths.size * len(recurrent.layers) * recurrent.shape.numbers * 4
    return kv_bytes(config, lengths) + states


def expert_itemsize(config: ModelConfig) -> float:
    """Bytes of a number of an expert, with its part of a scale."""
    return 0.5 + 1 / GROUP if config.quantization.weights == "mxfp4" else config.dtype.itemsize
