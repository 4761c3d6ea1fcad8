"""The self-attention of an encoder: each token sees those before and after it, and nothing is kept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression, Index, StepPages
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.cache.plan.temperature import Temperature
from tandem.workers.models.config import ModelConfig

QUERIES_AT_ONCE = 512  # whose scores are in memory together


class Bidirectional:
    """A CachedAttention without a cache: of one forward of whole prompts. Softmax and scores are float32."""

    def __init__(self, config: ModelConfig, rotary: RotaryEmbedding, lengths: Sequence[int], positions: Tensor) -> None:
        """config: the encoder's. lengths: tokens of each prompt. positions: int64 [T], of all tokens in theirs."""
        self._windows = config.layer_windows or (None,) * config.num_layers
        self._scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
        self._softcap = config.attn_softcap
        self._lengths = list(lengths)
        self._rotation = rotary.rotation(positions)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        """See CachedAttention; without sinks and norms. A window counts on both sides, as transformers has it."""
        q, k = self._rotation.apply_both(q, k)
        parts = (one.split(self._lengths) for one in (q, k, v))
        return torch.cat([self._attend_one(self._windows[layer], *prompt) for prompt in zip(*parts, strict=True)])

    def _attend_one(self, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns o of one prompt's tokens [n, Hq, D], some queries at a time."""
        count, kv_heads = k.shape[0], k.shape[1]
        keys, values = (one.transpose(0, 1).float().unsqueeze(1) for one in (k, v))  # [Hkv, 1, n, D]
        outputs = []
        for begin in range(0, count, QUERIES_AT_ONCE):
            some = q[begin : begin + QUERIES_AT_ONCE].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            scores = some @ keys.transpose(2, 3) * self._scale
            if self._softcap is not None:
                scores = torch.tanh(scores / self._softcap) * self._softcap
            if window is not None:
                own = torch.arange(begin, begin + some.shape[2], device=q.device)[:, None]
                scores = scores.masked_fill((own - torch.arange(count, device=q.device)).abs() > window, -torch.inf)
            outputs.append((scores.softmax(-1) @ values).permute(2, 0, 1, 3).flatten(1, 2))
        return torch.cat(outputs).to(q.dtype)

    def step_pages(self, layers: range) -> StepPages | None:
        """Returns no pages."""
        return None

    def read(self, layer: int, q: Tensor, sinks: Tensor | None, norm: HeadNorm | None) -> Tensor:
        raise NotImplementedError("an encoder's layers keep nothing")

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        raise NotImplementedError("an encoder's layers have no K and V in one plane")

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        raise NotImplementedError("an encoder's layers have no latents")

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        raise NotImplementedError("an encoder's layers keep no states")

    def temperatures(self, rule: Temperature) -> Tensor:
        raise NotImplementedError("an encoder's layers have no temperatures")
