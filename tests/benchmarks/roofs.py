"""Computes how fast a step or a prompt of a dense model can be on a device, by its rates of copies and of products."""

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
    """Returns the FLOPs of a prompt, with half of the attention square."""
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * length**2
    return 2 * layer_weights(config) * length + attention + 2 * config.vocab_size * config.hidden_size


def prefill_floor(config: ModelConfig, length: int, roofs: Roofs) -> float:
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return max(weights, prefill_flops(config, length) / roofs.product)


def parameters(config: ModelConfig) -> int:
    """Elements of all weights of a dense model, but for norms."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return product_weights(config) + embedding


def goodput_roof(config: ModelConfig, prompts: Lengths, outputs: Lengths, roofs: Roofs, step: float) -> float:
    """Requests a second that one device can serve for ever with steps of at most `step` seconds.

    prompts, outputs: int64 [requests], tokens, a sample of what comes. A request costs

        f = 2 · parameters · (prompt + output) + attention    FLOP; attention: half of the prompt's square, all layers
        k = Σ over its outputs of the positions stored        read once a step, times the bytes of a position

    on average. At r requests a second a step of T seconds has r · T · f FLOP and reads r · T · k bytes of KV. Its
    products take that time or the time in which weights are read once, whichever is longer; then KV is read:

        T = max(weights / C, r · T · f / F) + r · T · k / C

    so r = min(1 / (f / F + k / C), (1 - weights / (C · T)) · C / k). By convention each token costs 2 FLOP a
    parameter. A prompt needs its head only once and an embedding is no product, so the hard limit of Qwen3-8B is some
    10 % higher. Chunks that read the KV of chunks before them, queues and host time are left out.
    """
    heads = config.num_layers * config.num_heads * config.head_dim
    tokens = float((prompts + outputs).mean())
    flops = 2 * parameters(config) * tokens + 2 * heads * float((prompts.astype(float) ** 2).mean())
    stored = prompts * outputs + outputs * outputs // 2
    read = kv_seconds(config, stored, roofs) / stored.size
    weights = product_weights(config) * config.dtype.itemsize / roofs.copy
    return max(0.0, min(1 / (flops / roofs.product + read), (1 - weights / step) / read))
