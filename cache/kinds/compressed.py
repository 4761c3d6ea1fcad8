"""Entries that layers keep in addition to those they attend to: compressed KV, its inputs, and its index keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tandem.cache.kernels.base import Entries, EntryBackend, SharedKV
from tandem.cache.kernels.gpu_limits import check_shared_dim
from tandem.cache.kernels.torch.entries import TorchEntryKernels
from tandem.cache.kinds.kind import ServedKind, Site, kind_of
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import DTYPES, KVLayout
from tandem.cache.plan.spans import ALL, Span


@dataclass(frozen=True)
class Beside(ServedKind):
    """One plane or two, of an element type of their own (None: the layout's), perhaps an entry for several positions:
    see Attention.store. top_k: the entries are index keys of compressed ones, see CompressedGroups."""

    num_kv_heads: int
    head_dim: int
    keeps: Span = ALL
    planes: int = 2
    dtype: torch.dtype | None = None
    top_k: int | None = None

    attended = False
    whole_on_ranks = True
    takes = Entries
    serves = "store"
    holds = "entries beside others"
    no_scales = "entries beside others, or with one plane; scales must be None"
    no_sliding = "entries beside"

    @property
    def part(self) -> str:
        """The role of this group next to a group with K and V in one plane: a field of CompressedGroups."""
        if self.keeps.every == 1:
            return "inputs"
        return "entries" if self.top_k is None else "keys"

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        """Layers must be layers of groups that are attended to."""
        super().check(index, groups, page_size)
        layers = groups[index].layers
        if self.planes not in (1, 2):
            raise InvalidArgument(f"planes of group {index} is {self.planes}; it must be 1 or 2")
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype of group {index} is {self.dtype}; it must be one of {', '.join(DTYPES)}")
        stored = {layer for one in groups if one.kind.attended for layer in one.layers}
        if not layers or not set(layers) <= stored or len(set(layers)) < len(layers):
            raise InvalidArgument(
                f"group {index} stands beside others with layers {list(layers)}; they must be some of "
                f"{sorted(stored)}, each once"
            )
        if self.top_k is None:
            return
        integer(f"top_k of group {index}", self.top_k, least=1)
        shared = {layer for one in groups if kind_of(one).takes is SharedKV for layer in one.layers}
        if self.keeps.every == 1 or not shared.intersection(layers):
            raise InvalidArgument(f"top_k of group {index} is {self.top_k}, but its layers have no compressed KV")

    def check_rope(self, rotary_dim: int) -> None:
        """Accepts any RoPE: entries are stored as they are."""

    def backend(self, site: Site) -> EntryBackend:
        return TorchEntryKernels(site.pool)

    def check_inputs(self, num_tokens: int, x: Entries, site: Site) -> None:
        if self.planes == 1 and x.v is not None:
            raise InvalidArgument("v is given, but entries have one plane; it must be None")
        for name, tensor in (("k", x.k), ("v", x.v))[: self.planes]:
            check_tensor(name, tensor, (num_tokens, self.num_kv_heads, self.head_dim), site.pool.dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        """Checks groups with a compressor. Other entries are torch's, which accepts all."""
        if any(index in (of.entries, of.keys) for of in compressed_groups(layout).values()):
            check_shared_dim("head_dim" if self.top_k is None else "index_head_dim", self.head_dim)


class CompressedGroups(NamedTuple):
    """The groups that hold the compressed KV of a layer with K and V in one plane (DeepSeek-V4).

    inputs: values (plane 0) and gates (plane 1) that make entries, for the positions of one entry, or of two where
    entries overlap. entries: compressed KV, one for several positions. keys: index keys of the entries, by which a
    query chooses top_k entries; None: a query attends to all.
    """

    inputs: int
    entries: int
    keys: int | None
    top_k: int | None


def compressed_groups(layout: KVLayout) -> dict[int, CompressedGroups]:
    """Returns for each layer with compressed KV the groups that hold it."""
    shared = {layer for group in layout.groups if kind_of(group).takes is SharedKV for layer in group.layers}
    found: dict[int, dict[str, int]] = {}
    for index, group in enumerate(layout.groups):
        if isinstance(group.kind, Beside):
            for layer in shared.intersection(group.layers):
                of = found.setdefault(layer, {})
                of[group.kind.part] = index
                if group.kind.top_k is not None:
                    of["top_k"] = group.kind.top_k
    return {
        layer: CompressedGroups(of["inputs"], of["entries"], of.get("keys"), of.get("top_k"))
        for layer, of in sorted(found.items())
    }


def compresses(beside: Sequence[Beside], head_dim: int) -> bool:
    """Whether what stands beside a layer, whose K and V are head_dim wide, is what CompressedGroups says."""
    parts = {kind.part: kind for kind in beside}
    inputs, entries, keys = parts.get("inputs"), parts.get("entries"), parts.get("keys")
    if inputs is None or entries is None or len(beside) != len(parts):
        return False
    made = [entries] if keys is None else [entries, keys]
    every, width = entries.keeps.every, sum(kind.head_dim for kind in made)
    overlap, left = divmod(inputs.keeps.window or 0, every)
    alike = all(kind.planes == 1 and kind.num_kv_heads == 1 and kind.keeps.every == every for kind in made)
    own = inputs.planes == 2 and inputs.num_kv_heads == 1 and inputs.head_dim == overlap * width
    return alike and own and left == 0 and overlap in (1, 2) and entries.head_dim == head_dim
