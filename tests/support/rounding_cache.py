"""A cache of transformers that rounds as an FP8 cache does."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tandem.cache.plan.kv_scales import KVScales
from tests.cache.naive import round_by


class RoundingCache(DynamicCache):
    """Keeps what is left of K, rotated, and V in the entries of an FP8 cache."""

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
