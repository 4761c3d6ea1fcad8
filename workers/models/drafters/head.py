"""A layer that drafts from what its target has computed: one of multi-token prediction, or an EAGLE-3 head."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.drafters.layers import LayersBehind


class DraftHead(Protocol):
    """One decoder layer with its own entrance and exit. It keeps an entry for each position of the target: of what the
    target has computed there, and of the token that follows."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose inputs it takes, one after another; none: what the target's head takes."""
        ...

    def enter(self, features: Tensor) -> Tensor:
        """Turns the target's features into the input of __call__, [T, H]."""
        ...

    def __call__(self, hidden: Tensor, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        """Returns [T, H], of the same kind as `hidden`, which may be overwritten. next_ids: int64 [T], the token
        that follows each position's."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the tokens after next_ids, [n, the target's vocabulary], for rows that __call__
        gave."""
        ...


class HeadedDecoder:
    """A target, and the head whose layer stands after the target's own.

    Each forward computes both. Of a step the head computes its part when the step's tokens are sampled: follow(). Of
    prompts the next token is the prompt's, or the first token where the prompt ends: the sampled one after
    begin_prompts(), the best one in forward(). Where a chunk ends within a prompt, or next to another, that entry of
    the head is made with a wrong token, which costs a little acceptance.
    """

    encode = None  # drafters have targets without an encoder

    def __init__(self, target: DenseDecoder, head: DraftHead) -> None:
        self.config = target.config
        self.head = head
        self.layers = range(target.config.num_layers, target.config.num_layers + 1)
        self.target = target
        self._features: Tensor | None = None  # of the step that follow() ends

    @property
    def device(self) -> torch.device:
        return self.target.device

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """The target's logits, see DenseDecoder.forward. last_rows None: of a step, which follow() ends."""
        if last_rows is None and self.head.taps:
            logits, self._features = self.target.tapped_step(token_ids, cached, self.head.taps)
            return logits
        if last_rows is not None:
            logits, follow = self.begin_prompts(token_ids, cached, last_rows)
            follow(logits.argmax(1))
            return logits
        hidden, self._features = self._compute(token_ids, cached, None)
        return self.target.logits(hidden)

    def begin_prompts(
        self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        """See Decoder."""
        hidden, features = self._compute(token_ids, cached, last_rows)
        return self.target.logits(hidden), partial(self._follow_prompts, features, token_ids, last_rows, cached)

    def _follow_prompts(
        self, features: Tensor, token_ids: Tensor, last_rows: Tensor, cached: CachedAttention, first_tokens: Tensor
    ) -> None:
        first = self._known(first_tokens[: last_rows.shape[0]])
        self._store(features, _next_ids(token_ids, last_rows, first), cached)

    def hidden(self, token_ids: Tensor, cached: CachedAttention, rows: Tensor) -> Tensor:
        """See DenseDecoder.hidden."""
        hidden, features = self._compute(token_ids, cached, rows)
        self._store(features, token_ids.roll(-1), cached)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See DenseDecoder.logits."""
        return self.target.logits(hidden)

    def follow(self, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        """Returns the head's output [T, H] for each row of a step's forward. next_ids: int64 [T], sampled after the
        forward. If logits are not finite, the id is no token, and the last token is taken in its place."""
        features, self._features = self._features, None
        assert features is not None, "a step comes first"
        return self._store(features, self._known(next_ids), cached)

    def draft_steps(self) -> "HeadSteps":
        """The head by itself."""
        return HeadSteps(self)

    def draft(self, hidden: Tensor, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        """A step of the head alone, from what it gave for the position before, [n, H]; the same of the next."""
        return self.head(hidden.clone(), self._known(next_ids), LayersBehind(cached, self.layers.start))

    def _store(self, features: Tensor, next_ids: Tensor, cached: CachedAttention) -> Tensor:
        return self.head(self.head.enter(features), next_ids, LayersBehind(cached, self.layers.start))

    def _known(self, token_ids: Tensor) -> Tensor:
        return token_ids.clamp(max=self.config.vocab_size - 1)

    def _compute(self, token_ids: Tensor, cached: CachedAttention, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the input of the target's head for `rows`, and features of all rows."""
        if self.head.taps:
            return self.target.tapped(token_ids, cached, rows, self.head.taps)
        hidden = self.target.hidden(token_ids, cached, None)
        return hidden if rows is None else hidden.index_select(0, rows), hidden


class HeadSteps:
    """The head by itself: a Decoder of its layer. Each step goes on from what the one before gave, in memory that stays
    where it is, for graphs."""

    ahead: Literal[1] = 1  # see DraftSteps
    follow = begin_prompts = None  # see Decoder

    def __init__(self, model: HeadedDecoder) -> None:
        self.config = model.config
        self.layers = model.layers
        self._model = model
        self._reserved: Tensor | None = None
        self._hidden: Tensor | None = None  # [rows or more, H], of the last step

    @property
    def device(self) -> torch.device:
        return self._model.device

    def reserve(self, num_rows: int) -> None:
        """Makes steps of up to so many rows use one memory from now on."""
        shape = num_rows, self.config.hidden_size
        self._reserved = self._hidden = torch.zeros(shape, dtype=self.config.dtype, device=self.device)

    @torch.inference_mode()
    def go_on_from(self, outputs: Tensor, rows: Tensor) -> None:
        """The next step is after these rows, int64 [n], of what the head gave, [T, H]."""
        room = self._reserved
        if room is None or rows.shape[0] > room.shape[0]:
            self._hidden = outputs.index_select(0, rows)
        else:
            self._hidden = room
            torch.index_select(outputs, 0, rows, out=room[: rows.shape[0]])

    def logits_ahead(self, num_rows: int) -> Tensor:
        """[n, vocab], after the first rows that are gone on from, with no step."""
        assert self._hidden is not None, "rows to go on from come first"
        return self._model.head.logits(self._hidden[:num_rows])

    def forward(self, token_ids: Tensor, cached: CachedAttention, last_rows: Tensor | None) -> Tensor:
        """Logits [n, vocab] after the next tokens of the first rows, int64 [n]; see DenseDecoder.forward."""
        assert last_rows is None, "a step's rows are all wanted"
        assert self._hidden is not None, "rows to go on from come first"
        hidden = self._hidden[: token_ids.shape[0]]
        hidden.copy_(self._model.draft(hidden, token_ids, cached))
        return self._model.head.logits(hidden)


def _next_ids(token_ids: Tensor, last_rows: Tensor, first_tokens: Tensor) -> Tensor:
    """Returns for each row of a forward the token of the next one. last_rows, but the first, get the prompts' first
    tokens, int64 [n]. Graph buffers pad last_rows with the first row."""
    count = token_ids.shape[0]
    next_ids = torch.cat((token_ids.roll(-1), token_ids[:1]))
    if last_rows.shape[0]:
        next_ids.index_copy_(0, torch.where(last_rows == 0, count, last_rows), first_tokens)
    return next_ids[:count]
