"""Caches and models of transformers that round as an FP8 cache does."""

from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel

from tandem.cache.plan.kv_scales import KVScales
from tests.cache.rounding import round_by, round_rows


class RoundingCache(DynamicCache):
    """Stores rotated K, and V, rounded as entries of an FP8 cache."""

    def __init__(self, model: PreTrainedModel, scales: KVScales) -> None:
        super().__init__(config=model.config)
        self.scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = (
            round_by(states[0].transpose(0, 1).double(), scales[layer_idx]).to(states.dtype).transpose(0, 1)[None]
            for states, scales in ((key_states, self.scales.k), (value_states, self.scales.v))
        )
        return super().update(k, v, layer_idx, *args, **kwargs)


class RoundingKeys(DynamicCache):
    """Stores rotated index keys, rounded as rows of an FP8 cache."""

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        rounded = round_rows(indexer_key_states.double(), indexer_key_states.shape[-1])
        return super().update_indexer(rounded.to(indexer_key_states.dtype), layer_idx)


def round_latents(model: PreTrainedModel) -> None:
    """Makes the model compute K and V from its latents as they remain in the rows of an FP8 cache."""

    def rounded(module: Module, inputs: Any, latents: Tensor) -> Tensor:
        return round_rows(latents.double(), latents.shape[-1]).to(latents.dtype)

    for name, module in model.named_modules():
        if name.endswith("kv_a_layernorm"):
            module.register_forward_hook(rounded)
