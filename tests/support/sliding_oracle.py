"""StreamingLLM over transformers: KV kept as sinks and a window, K rotated anew by its place in what is left."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def slide_greedily(model: Any, prompt: Sequence[int], num_tokens: int, window: int, sinks: int) -> list[int]:
    """num_tokens tokens of a decoder like Llama. The prompt is computed as always; each later token sees, with itself,
    `window` tokens at most: the first `sinks` and the latest."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([list(prompt)]), past_key_values=cache).logits
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        _evict(model, cache, window - 1, sinks)
        index = torch.tensor([[cache.get_seq_length()]])
        logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache, position_ids=index).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _evict(model: Any, cache: Any, most: int, sinks: int) -> None:
    """Lets `most` tokens stay, and moves those behind the sinks down."""
    excess = cache.get_seq_length() - most
    if excess <= 0:
        return
    for layer in cache.layers:
        kept = layer.keys[:, :, sinks + excess :]
        layer.keys = torch.cat((layer.keys[:, :, :sinks], _moved(model, kept, -excess)), 2)
        layer.values = torch.cat((layer.values[:, :, :sinks], layer.values[:, :, sinks + excess :]), 2)


def _moved(model: Any, keys: Tensor, positions: int) -> Tensor:
    cos, sin = model.model.rotary_emb(keys, torch.full((1, keys.shape[2]), positions))
    first, second = keys.chunk(2, -1)
    return keys * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
