"""StreamingLLM over transformers: KV is kept as sinks and a window, and K is rotated anew by its place among them."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def slide_greedily(model: Any, prompt: Sequence[int], num_tokens: int, window: int, sinks: int) -> list[int]:
    """num_tokens tokens of a decoder. The prompt is computed as always; each later token sees, with itself, `window`
    tokens at most: the first `sinks` and the latest. Of these, layers with windows or chunks see what they would see
    of the whole text."""
    from transformers import DynamicCache

    cache, kept = DynamicCache(), list(range(len(prompt)))  # without a config no layer of the cache drops anything
    logits = model(torch.tensor([list(prompt)]), past_key_values=cache).logits
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        excess = len(kept) - (window - 1)
        if excess > 0:
            _evict(model, cache, excess, sinks)
            del kept[sinks : sinks + excess]
        index = torch.tensor([[len(kept)]])
        kept.append(len(prompt) + len(tokens) - 1)
        logits = model(
            torch.tensor([tokens[-1:]]),
            past_key_values=cache,
            position_ids=index,
            cache_position=index[0],
            attention_mask=_masks(model.config, torch.tensor(kept)),
        ).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _masks(config: Any, kept: Tensor) -> Any:
    """Returns what the newest of the positions `kept` sees of them: a mask, or one for each kind of layer."""
    seen = {"full_attention": torch.ones_like(kept, dtype=torch.bool)}
    if (window := getattr(config, "sliding_window", None)) is not None:
        seen["sliding_attention"] = kept > kept[-1] - window
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        seen["chunked_attention"] = kept // chunk == kept[-1] // chunk
    masks = {kind: torch.where(of, 0.0, torch.finfo(torch.float32).min)[None, None, None] for kind, of in seen.items()}
    return masks if getattr(config, "layer_types", None) else list(masks.values())[-1]


def _evict(model: Any, cache: Any, excess: int, sinks: int) -> None:
    """Removes `excess` tokens after the sinks, and moves the later ones down. For latents, the rotated part is in the
    place of values."""
    rotated = "values" if hasattr(model.config, "kv_lora_rank") else "keys"
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            first, kept = getattr(layer, name)[:, :, :sinks], getattr(layer, name)[:, :, sinks + excess :]
            kept = _moved(model, number, kept, -excess) if name == rotated else kept
            setattr(layer, name, torch.cat((first, kept), 2))


def _moved(model: Any, layer: int, keys: Tensor, positions: int) -> Tensor:
    """Returns keys [1, heads, n, head_dim] rotated by so many more positions."""
    if not getattr(model.model.layers[layer].self_attn, "use_rope", True):
        return keys
    rotary, kinds = model.model.rotary_emb, getattr(model.config, "layer_types", None)
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    factors = rotary(keys, torch.full((1, keys.shape[2]), positions), *([kinds[layer]] if by_kind and kinds else []))
    if isinstance(factors, Tensor):  # Llama 4's, complex: neighbours are a pair
        pairs = torch.view_as_complex(keys.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * factors[:, None]).flatten(-2)
    cos, sin = (factor if factor.shape[-1] * 2 != keys.shape[-1] else factor.repeat(1, 1, 2) for factor in factors)
    scale = torch.hypot(cos, sin).amax()  # of YaRN, which K has already
    first, second = keys.chunk(2, -1)
    return (keys * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]) / scale
