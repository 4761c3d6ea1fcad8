"""Kinds of state: what a layer keeps of a sequence, as far as layouts, pages and transfers know it.

tandem.cache.kinds has a file for each, and the half of the contract by which its layers attend.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.shard import HeldNumbers, Shard
from tandem.cache.plan.spans import ALL, Span


class Kind(ABC):
    """A frozen dataclass: the shape of an entry, its span, and what follows from both.

    An entry is `planes` times [num_kv_heads, head_dim], of `dtype`; None: of the layout's. keeps: which entries later
    queries need; pages of others are dropped. Kinds are equal exactly where their pages mean the same, and their
    repr goes into the layout's fingerprint.
    """

    num_kv_heads: int
    head_dim: int
    keeps: Span
    planes: int = 2
    dtype: torch.dtype | None = None
    replicas: int = 1
    """Ranks of a shard that keep the same heads, one after another."""

    attended = True
    """Whether layers attend to the entries: a layer stands in one such group. Others stand next to that group."""
    readable = False
    """Whether later layers may attend to what a layer has stored: see KVLayout.readers."""
    whole_on_ranks = False
    """Whether each rank of a shard holds whole entries. Else it holds some heads of each entry, or the numbers of
    held()."""
    no_scales: str | None = None
    """Why entries cannot be stored in 8 bits: what a layout has groups with. None: they can."""
    no_sliding: str | None = None
    """Why sequences cannot slide: what a layout has groups with. None: they can."""

    @property
    def rotated(self) -> int | None:
        """How many of an entry's last numbers RoPE rotates; None: as many of a head's as it says."""
        return None

    def held(self, shard: Shard) -> tuple[HeldNumbers, ...]:
        """Returns the numbers of a whole entry that a rank's entry has, in its order, for kinds whose ranks divide the
        numbers of the only head. Empty: ranks divide heads, or nothing."""
        return ()

    def whole(self, shard: Shard) -> "Kind":
        """Returns the kind that a worker of one rank would keep, for kinds with held(). Others return themselves."""
        return self

    def fp8_rows(self, dtype: torch.dtype) -> Fp8Rows | None:
        """How a cache of 8 bits stores an entry whose numbers are computed in `dtype`; None: each number by the scales
        of its layer."""
        return None

    def check(self, index: int, groups: "Sequence[LayerGroup]", page_size: int) -> None:
        """InvalidArgument unless group `index` of a layout's `groups` can be of this kind, among these."""
        for name in ("num_kv_heads", "head_dim"):
            integer(f"{name} of group {index}", getattr(self, name), least=1)
        if not isinstance(self.keeps, Span):
            raise InvalidArgument(f"keeps of group {index} is {self.keeps!r}; it must be a Span, such as {ALL}")
        if self.keeps.chunk is not None and self.keeps.chunk % page_size:
            raise InvalidArgument(
                f"keeps of group {index} is chunks of {self.keeps.chunk} positions; it must be a multiple of "
                f"page_size, {page_size}"
            )
        if self.attended and self.keeps.every > 1:
            raise InvalidArgument(
                f"keeps of group {index} is {self.keeps}, but it does not stand next to others; it must be a span with "
                "an entry for each position"
            )

    def check_rope(self, rotary_dim: int) -> None:
        """InvalidArgument unless RoPE can rotate so many numbers of a head."""
        if self.rotated is not None and rotary_dim != self.rotated:
            raise InvalidArgument(f"rotary_dim is {rotary_dim}; entries of its group end in {self.rotated} rotated")
        if rotary_dim > self.head_dim:
            raise InvalidArgument(f"rotary_dim is {rotary_dim}; the head_dim of its group is {self.head_dim}")


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep entries of one kind, in one pool and by one page table.

    A pool is one tensor `[num_pages, len(layers), planes, num_kv_heads, page_entries, head_dim]`: a page is one
    contiguous span that holds all layers of the group.
    """

    layers: tuple[int, ...]
    kind: Kind

    @property
    def num_kv_heads(self) -> int:
        return self.kind.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.kind.head_dim

    @property
    def keeps(self) -> Span:
        return self.kind.keeps

    @property
    def planes(self) -> int:
        return self.kind.planes
