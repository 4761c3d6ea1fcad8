"""The places of entries, token by token, as kernels for compressed KV read them.

Each token is looked up by itself, so that a forward of fixed shape takes decode steps, verify steps and prompts alike.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenPages:
    """The pages of each token's sequence in one layer group. Entry e ≥ begins[t] of token t's sequence stands in page
    kv_indices[firsts[t] + (e - begins[t]) // page_size]. All int32: firsts and begins [T]; at least one page."""

    firsts: Tensor
    begins: Tensor
    kv_indices: Tensor

    def places(self, entries: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """int64, both shaped as entries, int64 [T, n]: the page of each, and the place in it. Of entries that are not
        there they mean nothing, but are in the pool."""
        relative = (entries - self.begins[:, None]).clamp(min=0)
        index = (self.firsts[:, None] + relative // page_size).clamp(max=self.kv_indices.shape[0] - 1)
        pages = self.kv_indices[index.long()]
        return pages.long(), relative % page_size


@dataclass(frozen=True, eq=False)
class NewTokens:
    """positions: int64 [T]. preceding: int32 [T], how many tokens right before a token are earlier new ones of the same
    sequence. slots: int32 [T], where a token's inputs are stored; below 0: nothing of the token is stored."""

    positions: Tensor
    preceding: Tensor
    slots: Tensor
