"""The lightning indexer of a layer: what its queries choose positions by. See tandem.cache.kernels.index_keys."""

import torch.nn.functional as F
from torch import Tensor

from tandem.cache.kernels.base import Index
from tandem.workers.models.indexer.fields import IndexConfig
from tandem.workers.models.indexer.row_order import halves_first, last_first
from tandem.workers.models.parameters import IndexParameters

KEY_NORM_EPS = 1e-6  # as in transformers, whatever the config says


class Indexer:
    """Index q of what q's first map gives; one key and a weight for each head of the hidden state."""

    def __init__(self, config: IndexConfig, rotated: int, parameters: IndexParameters) -> None:
        """Puts rows in order, in `parameters`: rows of rotated numbers last, and halves first where neighbours are
        rotated."""
        self._config = config
        self._parts = (config.head_dim - rotated, rotated)
        norm = parameters.key_norm
        assert norm.bias is not None  # a LayerNorm
        ordered = [*parameters.q_up.tensors().values(), *parameters.key.tensors().values(), norm.weight, norm.bias]
        for rows in (one.unflatten(0, (-1, config.head_dim)) for one in ordered):
            if config.interleaved:
                halves_first(rows[:, :rotated])
            last_first(rows, rotated)
        self._q_up = parameters.q_up.prepare()
        self._key = parameters.key.prepare()
        self._norm_weight, self._norm_bias = norm.weight, norm.bias
        self._weights = parameters.weights
        self._scale = (config.num_heads * config.head_dim) ** -0.5

    def __call__(self, x: Tensor, q: Tensor) -> Index:
        """Makes the index of x [T, hidden]; q [T, q_rank], normed."""
        size = (self._config.head_dim,)
        key = F.layer_norm(self._key.linear(x), size, self._norm_weight, self._norm_bias, KEY_NORM_EPS)
        still, rotated = key.split_with_sizes(self._parts, 1)
        weights = self._weights.linear(x.float()).mul_(self._scale)
        return Index(self._q_up.linear(q).unflatten(1, (-1, self._config.head_dim)), still, rotated, weights)
