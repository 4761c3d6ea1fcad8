"""A model and the small one that drafts for it, over one cache."""

from typing import Literal

import torch
from torch import Tensor

from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.drafters.layers import LayersBehind


class DraftSteps:
    """The drafter by itself: a Decoder of its own layers, which stand after the target's.

    Tokens that only one of both vocabularies has, which is padding, are never drafted. What is no token, of logits that
    are not finite, is taken for the last.
    """

    ahead: Literal[0] = 0  # tokens that are drafted from what is there before the first step
    follow = begin_prompts = None  # see Decoder

    def __init__(self, drafter: DenseDecoder, target: ModelConfig) -> None:
        self.config = drafter.config
        self.layers = range(target.num_layers, target.num_layers + drafter.config.num_layers)
        self._drafter = drafter
        self._vocab = min(target.vocab_size, drafter.config.vocab_size)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=drafter.device)

    @property
    def device(self) -> torch.device:
        return self._drafter.device

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """Logits [n, vocab] of the tokens that may be drafted; see DenseDecoder.forward. cached: of all layers."""
        ids = token_ids.clamp(max=self._vocab - 1)
        logits = self._drafter.forward(ids, LayersBehind(cached, self.layers.start), last_rows)
        return logits if logits.shape[1] == self._vocab else logits[:, : self._vocab].contiguous()

    def store(self, token_ids: Tensor, cached: CachedAttention) -> None:
        """Computes what the drafter's layers keep for these tokens."""
        self.forward(token_ids, cached, self._no_rows)


class DraftedDecoder:
    """The target, with which each forward computes what the drafter's layers keep of the same tokens.

    So a position that is stored is stored in all layers: prefixes, pushes and moves bring the drafter's KV along, and a
    drafter has nothing to catch up on. A sequence that gave up drafts may lack some (Speculation.step): after those a
    drafter is wrong.
    """

    follow = begin_prompts = None  # see Decoder
    encode = None  # drafters have targets without an encoder

    def __init__(self, target: DenseDecoder, drafter: DenseDecoder) -> None:
        self.config = target.config
        self._steps = DraftSteps(drafter, target.config)
        self.target = target

    @property
    def device(self) -> torch.device:
        return self.target.device

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """Returns the target's logits, see DenseDecoder.forward."""
        self._steps.store(token_ids, cached)
        return self.target.forward(token_ids, cached, last_rows)

    def draft_steps(self) -> DraftSteps:
        """The drafter by itself."""
        return self._steps

    def hidden(self, token_ids: Tensor, cached: CachedAttention, rows: Tensor) -> Tensor:
        """See DenseDecoder.hidden."""
        self._steps.store(token_ids, cached)
        return self.target.hidden(token_ids, cached, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """See DenseDecoder.logits."""
        return self.target.logits(hidden)
