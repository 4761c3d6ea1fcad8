"""What one page of KV looks like: the contract that both sides of a transfer must share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.kv_scales import FP8, KVScales

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV entries are alike and share one pool and one page table.

    A pool is one tensor `[num_pages, len(layers), 2, num_kv_heads, page_size, head_dim]`, K at 0 and V at 1:
    a page is one contiguous span that holds all layers of the group. window: how many positions a token sees, its own
    included; pages behind it are let go of. None: all.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def page_shape(self, page_size: int) -> tuple[int, int, int, int, int]:
        return (len(self.layers), 2, self.num_kv_heads, page_size, self.head_dim)


@dataclass(frozen=True)
class KVLayout:
    """Groups of layers, positions per page and element type of a paged KV cache.

    dtype: of K and V as they are computed. scales: K and V are stored as float8_e4m3fn, divided by these; None: as they
    are. Raises InvalidArgument when a field is out of range or a layer stands in two groups.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int
    dtype: torch.dtype
    scales: KVScales | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise InvalidArgument(f"page_size is {self.page_size}; it must be at least 1")
        if self.dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype is {self.dtype}; it must be one of {', '.join(DTYPES)}")
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if not layers or layers != list(range(len(layers))):
            raise InvalidArgument(f"groups hold layers {layers}; each of 0 … n-1 must stand in exactly one group")
        for index, group in enumerate(self.groups):
            if group.num_kv_heads < 1 or group.head_dim < 1:
                raise InvalidArgument(
                    f"group {index} has num_kv_heads {group.num_kv_heads} and head_dim {group.head_dim}; "
                    "both must be at least 1"
                )
            if group.window is not None and group.window < 1:
                raise InvalidArgument(f"group {index} has window {group.window}; it must be None or at least 1")
        if self.scales is not None:
            heads_of = {layer: group.num_kv_heads for group in self.groups for layer in group.layers}
            self.scales.check([heads_of[layer] for layer in layers])

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the pools' elements."""
        return self.dtype if self.scales is None else FP8

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def has_windows(self) -> bool:
        return any(group.window is not None for group in self.groups)

    def page_shape(self, group: int) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, 2, num_kv_heads, page_size, head_dim]."""
        return self.groups[group].page_shape(self.page_size)

    def page_bytes(self, group: int) -> int:
        elements = 1
        for extent in self.page_shape(group):
            elements *= extent
        return elements * self.stored_dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one position takes over all groups, while all of them hold it."""
        return sum(self.page_bytes(group) for group in range(len(self.groups))) // self.page_size

    def check_pools(self, pools: Sequence[Tensor]) -> None:
        """InvalidArgument unless these can be the pools of a cache: `[num_pages, *page_shape(group)]` each."""
        if len(pools) != len(self.groups):
            raise InvalidArgument(f"{len(pools)} pools were given; the layout has {len(self.groups)} groups")
        for group, pool in enumerate(pools):
            shape = ("num_pages ≥ 1", *self.page_shape(group))
            alike = pool.shape[1:] == shape[1:] and pool.shape[0] >= 1 and pool.dtype == self.stored_dtype
            if not alike or not pool.is_contiguous():
                raise InvalidArgument(
                    f"pool {group} is {tuple(pool.shape)} of {pool.dtype}; "
                    f"it must be {shape} of {self.stored_dtype}, contiguous"
                )

    @property
    def fingerprint(self) -> int:
        """64 bits that are equal exactly for equal layouts; checked when a position map is negotiated."""
        groups = [(g.layers, g.num_kv_heads, g.head_dim, g.window) for g in self.groups]
        text = repr((self.page_size, str(self.dtype), groups, self.scales))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
