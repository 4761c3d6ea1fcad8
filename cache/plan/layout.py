"""The form of one page of KV: the contract that both sides of a transfer must share."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import Kind, LayerGroup
from tandem.cache.plan.kv_scales import FP8, Fp8Rows, KVScales
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cache.plan.spans import Paging

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class KVLayout:
    """Groups of layers, positions per page and element type of a paged KV cache.

    page_size: positions of a page, in groups with an entry for each position. In other groups a page covers the fewest
    positions that make whole pages and whole entries. dtype: of K and V as they are computed. scales: entries are
    stored as float8_e4m3fn: K and V divided by these, and entries with Fp8Rows by scales of their own; None: as they
    are. readers: pairs of a layer that stores nothing and the earlier layer whose K and V it reads. keepless: layers
    that attend to nothing, and so keep nothing. Raises InvalidArgument when a field is out of range, a kind refuses its
    group, or a layer stands in two groups that are attended to.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int
    dtype: torch.dtype
    scales: KVScales | None = None
    shard: Shard = WHOLE  # whose KV heads the groups have
    readers: tuple[tuple[int, int], ...] = ()
    keepless: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        integer("page_size", self.page_size, least=1)
        if self.dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype is {self.dtype}; it must be one of {', '.join(DTYPES)}")
        stored = sorted(integer("layer", layer) for group in self._attended for layer in group.layers)
        others = [integer("layer of readers", layer) for layer, _ in self.readers]
        others += [integer("layer of keepless", layer) for layer in self.keepless]
        layers = sorted(stored + others)
        if not stored or layers != list(range(len(layers))):
            also = ", or read another layer" if self.readers else ", or be keepless" if self.keepless else ""
            raise InvalidArgument(f"groups hold layers {stored}; each of 0 … n-1 must stand in exactly one group{also}")
        for index, group in enumerate(self.groups):
            group.kind.check(index, self.groups, self.page_size)
        self._check_readers()
        if self.scales is not None:
            refused = next((group.kind.no_scales for group in self.groups if group.kind.no_scales), None)
            if refused is not None:
                raise InvalidArgument(f"scales are given, but the layout has groups with {refused}")
            self.scales.check([self.groups[group].num_kv_heads for group, _ in self.layer_index.values()])

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of pools whose groups have no dtype of their own."""
        return self.dtype if self.scales is None else FP8

    def stored_dtype_of(self, group: int) -> torch.dtype:
        """Returns the dtype of a group's pool."""
        return self.groups[group].kind.dtype or self.stored_dtype

    def fp8_rows(self, group: int) -> Fp8Rows | None:
        """How a cache of 8 bits stores entries that carry their own scales; None: entries are numbers of one dtype."""
        return None if self.scales is None else self.groups[group].kind.fp8_rows(self.dtype)

    @cached_property
    def paging(self) -> tuple[Paging, ...]:
        """The paging of each group."""
        return tuple(group.keeps.paging(self.page_size) for group in self.groups)

    @cached_property
    def grain(self) -> int:
        """Positions of the coarsest page: the fewest that are whole pages of every group. Prefixes are shared so."""
        return math.lcm(*(paging.positions for paging in self.paging if not paging.whole))

    @property
    def pages_together(self) -> tuple[int, ...]:
        """For each group, the positions of a page in units of page_size; 1 where a page covers a whole sequence."""
        return tuple(1 if paging.whole else paging.positions // self.page_size for paging in self.paging)

    def first_page_index(self, group: int, query: int) -> int:
        """The first page index that a group keeps when the next query stands at position `query`."""
        return self.groups[group].keeps.first_page_index(query, self.paging[group].entries, self.grain)

    def first_wanted(self, group: int, query: int) -> int:
        """See Span."""
        return self.groups[group].keeps.first_wanted(query, self.paging[group], self.grain)

    def most_pages(self, group: int, num_tokens: int, longest_append: int) -> int:
        """See Span."""
        keeps = self.groups[group].keeps
        return keeps.most_pages(num_tokens, longest_append, self.paging[group].entries, self.grain)

    @property
    def num_layers(self) -> int:
        """The number of layers that store K and V, latents or states, of readers, and of keepless layers."""
        return sum(len(group.layers) for group in self._attended) + len(self.readers) + len(self.keepless)

    @property
    def layer_index(self) -> dict[int, tuple[int, int]]:
        """For each layer, in order, the group that stores its K and V, or latents, and its index there. A reader has
        the values of the layer that it reads."""
        stored = self.index_of(lambda kind: kind.attended)
        return dict(sorted((stored | {layer: stored[of] for layer, of in self.readers}).items()))

    def index_of(self, chosen: Callable[[Kind], bool]) -> dict[int, tuple[int, int]]:
        """Returns for each layer in groups of the chosen kinds, in order, its group and its index there."""
        groups = ((index, group) for index, group in enumerate(self.groups) if chosen(group.kind))
        return dict(sorted((layer, (index, i)) for index, group in groups for i, layer in enumerate(group.layers)))

    @cached_property
    def has_encoder(self) -> bool:
        """Whether sequences begin with the positions of an encoder; see Given."""
        return any(group.keeps.given for group in self.groups)

    @cached_property
    def recurs(self) -> bool:
        """Whether some group keeps one entry of each sequence; see Last."""
        return any(group.keeps.last for group in self.groups)

    @cached_property
    def drops_past(self) -> bool:
        """Whether pages of some group are dropped as a sequence grows."""
        return any(group.keeps.drops_past for group in self.groups)

    def page_shape(self, group: int) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, planes, num_kv_heads, page_entries, head_dim], or the bytes of Fp8Rows last."""
        of, entries, rows = self.groups[group], self.paging[group].entries, self.fp8_rows(group)
        return (len(of.layers), of.planes, of.num_kv_heads, entries, of.head_dim if rows is None else rows.num_bytes)

    def page_bytes(self, group: int) -> int:
        return math.prod(self.page_shape(group)) * self.stored_dtype_of(group).itemsize

    def entry_bytes(self, group: int) -> int:
        """Returns the bytes of one entry in all layers."""
        return self.page_bytes(group) // self.paging[group].entries

    @property
    def token_bytes(self) -> int:
        """The bytes of KV of one position over all groups, while all hold it. An entry for several positions counts
        by its share, rounded down over all. An entry for a whole sequence does not count."""
        positions = ((group, paging.positions) for group, paging in enumerate(self.paging) if not paging.whole)
        pages = ((self.page_bytes(group), count) for group, count in positions)
        return sum(num_bytes * (self.grain // positions) for num_bytes, positions in pages) // self.grain

    def check_pools(self, pools: Sequence[Tensor]) -> None:
        """InvalidArgument unless these can be the pools of a cache: `[num_pages, *page_shape(group)]` each."""
        if len(pools) != len(self.groups):
            raise InvalidArgument(f"{len(pools)} pools were given; the layout has {len(self.groups)} groups")
        for group, pool in enumerate(pools):
            shape, dtype = ("num_pages ≥ 1", *self.page_shape(group)), self.stored_dtype_of(group)
            alike = pool.shape[1:] == shape[1:] and pool.shape[0] >= 1 and pool.dtype == dtype
            if not alike or not pool.is_contiguous():
                raise InvalidArgument(
                    f"pool {group} is {tuple(pool.shape)} of {pool.dtype}; it must be {shape} of {dtype}, contiguous"
                )

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that are equal exactly for equal layouts; checked when a position map is negotiated."""
        text = repr(
            (self.page_size, str(self.dtype), self.groups, self.scales, self.shard, self.readers, self.keepless)
        )
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @cached_property
    def _attended(self) -> list[LayerGroup]:
        return [group for group in self.groups if group.kind.attended]

    def _check_readers(self) -> None:
        readable = {layer for group in self.groups if group.kind.readable for layer in group.layers}
        for layer, of in self.readers:
            if of not in readable or of > layer:
                raise InvalidArgument(
                    f"readers has ({layer}, {of}): layer {layer} would read layer {of}; it must be an earlier layer "
                    "that stores K and V"
                )
