"""How fast a step or a prompt of a dense model can be on a device that copies and multiplies so fast."""

from dataclasses import dataclass

import torch

from tandem.workers.models.config import ModelConfig
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.device_time import device_seconds, measure_copy


@dataclass(frozen=True)
class Roofs:
    """copy: bytes a second (C); product: FLOP a second (F)."""

    copy: float
    product: float


def measure_roofs() -> Roofs:
    a, b = torch.randn((2, 8192, 8192), dtype=torch.bfloat16, device="cuda")
    return Roofs(measure_copy(), 2 * 8192**3 / device_seconds(lambda: a @ b))


def layer_weights(config: ModelConfig) -> int:
    """Elements of the products of all layers."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def product_weights(config: ModelConfig) -> int:
    """Elements of all products of a decode step."""
    return layer_weights(config) + config.vocab_size * config.hidden_size


def kv_seconds(config: ModelConfig, contexts: Lengths, roofs: Roofs) -> float:
    kv = int(contexts.sum()) * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return kv * config.dtype.itemsize / roofs.copy


def decode_floor(config: ModelConfig, contexts: Lengths, roofs: Roofs) -> float:
    """Seconds in which weights and KV are read. contexts: int64 [rows], positions stored."""
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return weights + kv_seconds(config, contexts, roofs)


def decode_roof(config: ModelConfig, contexts: Lengths, roofs: Roofs) -> float:
    """The floor, where products take the longer of reading weights and of their FLOP."""
    products = 2 * product_weights(config) * contexts.size / roofs.product
    return max(decode_floor(config, contexts, roofs), products + kv_seconds(config, contexts, roofs))


def prefill_flops(config: ModelConfig, length: int) -> float:
    """With half of the attention square."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    return 2 * layer_weights(config) * length + attention + 2 * config.vocab_size * config.hidden_size


def prefill_floor(config: ModelConfig, length: int, roofs: Roofs) -> float:
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return max(weights, prefill_flops(config, length) / roofs.product)
