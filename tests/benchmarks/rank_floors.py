"""What a decode step of one rank reads at least, by the config of its shard, and how often its ranks add up."""

from tandem.workers.models.config import ModelConfig
from tandem.workers.weights.formats.mxfp4 import GROUP

SUMS_A_LAYER = 2  # behind attention, and behind the feed-forward or the experts


def num_sums(config: ModelConfig) -> int:
    """Sums of [tokens, hidden_size] in a forward of a worker of several ranks."""
    return SUMS_A_LAYER * config.num_layers


def weight_bytes(config: ModelConfig, rows: int) -> float:
    """Of the matrices that a step of `rows` tokens multiplies by. Experts: as many as even choices make on average.

    In the dtype of the config, or experts in MXFP4. Norms, biases and sinks are left out.
    """
    hidden, moe = config.hidden_size, config.moe
    numbers = float(len(config.head_part) * hidden)
    for layer in range(config.num_layers):
        heads = sum(config.qkv_heads(layer)) + config.num_heads
        numbers += heads * config.head_dim * hidden
        if moe is None or layer not in moe.layers:
            numbers += 3 * hidden * config.intermediate_size
    dense = numbers * config.dtype.itemsize
    if moe is None:
        return dense
    router = moe.num_experts * hidden * config.dtype.itemsize
    chosen = len(config.experts) * (1 - (1 - moe.routing.top_k / moe.num_experts) ** rows)
    expert = 3 * hidden * moe.intermediate_size * expert_itemsize(config)
    return dense + len(moe.layers) * (router + chosen * expert)


def expert_itemsize(config: ModelConfig) -> float:
    """Bytes of a number of an expert, with its part of a scale."""
    return 0.5 + 1 / GROUP if config.quantization.weights == "mxfp4" else config.dtype.itemsize
