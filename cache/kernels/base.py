"""What a backend's kernels do for one layer group of a paged KV cache."""

from typing import Any, Protocol

from torch import Tensor

from tandem.cache.plan import PageTables, TokenLayout
from tandem.cache.position_map import Int32Array


class Kernels(Protocol):
    """Bound to one pool `[num_pages, layers, 2, num_kv_heads, page_size, head_dim]`; layer counts within the group.

    plan() once a forward, on the host; append() and attend() once a layer, with what it returned.
    """

    def plan(self, tokens: TokenLayout, tables: PageTables) -> Any:
        """Whatever append and attend need of this forward."""
        ...

    def append(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        """k and v [T, num_kv_heads, head_dim] of the new tokens into their slots."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Tensor:
        """o [T, num_q_heads, head_dim]: each token attends to its sequence's positions up to its own.

        q is [T, num_q_heads, head_dim]; k and v are those appended just before. num_q_heads is a multiple of
        num_kv_heads, and q head h reads KV head h // (num_q_heads / num_kv_heads).
        """
        ...

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        """All layers of pages sources[i] to targets[i], int32 [n] each."""
        ...

    def clear_pages(self, pages: Int32Array) -> None:
        """Makes sure that what stands in slots not yet written cannot reach an output (0 · NaN is NaN)."""
        ...

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Copies of k and v [n, num_kv_heads, head_dim] at `slots`, int32 [n]."""
        ...
