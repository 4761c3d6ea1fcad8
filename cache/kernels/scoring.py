"""Softmax attention over dense K and V with torch operations: masks, windows, softcap and learned sinks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array

ROWS_AT_ONCE = 256  # queries whose scores are in memory together


@dataclass(frozen=True)
class Scoring:
    """How scores are made of q · k, times scale. window: positions that a token sees, its own included; None: all.

    softcap: scaled scores become softcap · tanh(score / softcap); None: they stay.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """o [B, Hq, n, D] of q [B, Hq, n, D] over k and v [B, Hkv, m, D].

        mask: 0 or -inf, broadcast to [B, Hq, n, m] in q's dtype; the window is in it. sinks: [Hq].
        """
        if self.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, Hkv, group, n, D]
        products = grouped @ k.float().transpose(2, 3).unsqueeze(2)
        weights = self.weigh(products.flatten(1, 2), mask, sinks)
        weighted = weights.unflatten(1, (k.shape[1], -1)) @ v.float().unsqueeze(2)
        return weighted.flatten(1, 2).to(q.dtype)

    def weigh(self, products: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Softmax weights of products q · k, float32 [B, Hq, n, m], which may be overwritten."""
        scores = self._score(products, mask)
        if sinks is None:
            return scores.softmax(-1)
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1]

    def attend_in_part(self, products: Tensor, values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attends to some of the keys that queries see. Returns o [..., n, D] and the log-sum-exp of scores [..., n],
        float32.

        products: q · k, float32 [..., n, m], which may be overwritten; values: float32 [..., m, D].
        """
        scores = self._score(products, mask)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        return (weights @ values).div_(total), (top + total.log()).squeeze(-1)

    def _score(self, products: Tensor, mask: Tensor | None) -> Tensor:
        scores = products.mul_(self.scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores += mask
        return scores

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """o [B, H, n, D] of n tokens that see each other and nothing else; q [B, Hq, n, D], k and v [B, Hkv, n, D]."""
        length = q.shape[2]
        window = length if self.window is None else self.window
        if self.softcap is None and sinks is None and window >= length:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        # In bands: with a window, a row of blocks sees few columns, and scores never stand in memory all at once.
        parts, size = [], max(ROWS_AT_ONCE, window if window < length else 0)
        for begin in range(0, length, size):
            end, first = min(begin + size, length), max(begin - window + 1, 0)
            visible = np.arange(begin - first, end - first, dtype=np.int32) + 1
            mask = additive_mask(visible, end - first, self.window).to(q.device, q.dtype)
            parts.append(self.attend(q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end], mask, sinks))
        return torch.cat(parts, 2)


def additive_mask(visible: Int32Array, num_keys: int, window: int | None = None) -> Tensor:
    """float32 [n, num_keys]: row i is 0 at the last `window` of its first visible[i] keys (int32 [n], 1 … num_keys),
    -inf elsewhere."""
    # Rows are cut from one step: copying them is several times as fast as comparing and choosing.
    width = num_keys if window is None else min(window, num_keys)
    step = np.repeat(np.array([-np.inf, 0, -np.inf], np.float32), [num_keys - width, width, num_keys])
    cuts = np.ndarray((num_keys + 1, num_keys), np.float32, step, strides=(step.itemsize, step.itemsize))
    return torch.from_numpy(cuts[num_keys - visible])
