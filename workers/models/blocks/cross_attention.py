"""A decoder layer's attention to an encoder's output, between its own attention and its feed-forward."""

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.models.attention import split_heads
from tandem.workers.models.blocks.cached_attention import CachedAttention, EncoderStore
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import CrossParameters
from tandem.workers.ranks.ranks import Ranks, prepare_summed


class CrossAttention:
    """before, behind: the weights of its norms, [H]. o: the projection behind it."""

    def __init__(self, config: ModelConfig, index: int, parameters: CrossParameters, ranks: Ranks) -> None:
        """index: of its layer. The encoder's K and V are kept as layer num_layers + index."""
        self._layer = config.num_layers + index
        self._counts, self._head_dim = (config.num_heads, config.num_kv_heads), config.head_dim
        self._padding = config.stored_head_dim(config.head_dim) - config.head_dim
        self._q, self._kv = parameters.q.prepare(), parameters.kv.prepare()
        self.o = prepare_summed(parameters.o, ranks)
        self.before, self.behind = parameters.before, parameters.behind

    def store(self, encoded: Tensor, cached: EncoderStore) -> None:
        """K and V of the encoder's output [T, He], of all positions that the forward stores."""
        heads = split_heads(self._kv.linear(encoded), self._head_dim, (self._counts[1],) * 2)
        k, v = (F.pad(one, (0, self._padding)) for one in heads) if self._padding else heads
        cached.store_given(self._layer, k, v)

    def __call__(self, x: Tensor, cached: CachedAttention) -> Tensor:
        """o [T, num_heads · head_dim] of the normed x [T, H]."""
        (q,) = split_heads(self._q.linear(x), self._head_dim, self._counts[:1])
        q = F.pad(q, (0, self._padding)) if self._padding else q
        return cached.read(self._layer, q, None, None)[:, :, : self._head_dim].flatten(1)
