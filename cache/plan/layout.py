"""What one page of KV looks like: the contract that both sides of a transfer must share."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cache.plan.spans import ALL, Span

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV entries are alike and share one pool and one page table.

    A pool is one tensor `[num_pages, len(layers), planes, num_kv_heads, page_size, head_dim]`: a page is one contiguous
    span that holds all layers of the group. There are two planes, K at 0 and V at 1. keeps: which entries later queries
    need; pages of others are let go of.

    latent_rank: of multi-head latent attention (DeepSeek-V2), whose entries are one plane of one head: that many
    numbers of which every head's K and V are made, then the rotated part of K that the heads share.

    top_k: the entries are index keys (DeepSeek-V3.2), kept beside the latents of the same layers: a query attends to
    the top_k positions that it scores highest by them. latent_rank then counts the numbers that are not rotated.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    keeps: Span = ALL
    latent_rank: int | None = None
    top_k: int | None = None

    @property
    def planes(self) -> int:
        return 2 if self.latent_rank is None else 1


@dataclass(frozen=True)
class KVLayout:
    """Groups of layers, positions per page and element type of a paged KV cache.

    dtype: of K and V as they are computed. scales: K and V are stored as float8_e4m3fn, divided by these; None: as they
    are. readers: pairs of a layer that stores nothing and the earlier layer whose K and V it reads.
    Raises InvalidArgument when a field is out of range or a layer stands in two groups, but for index keys.
    """

    groups: tuple[LayerGroup, ...]
    page_size: int
    dtype: torch.dtype
    scales: KVScales | None = None
    shard: Shard = WHOLE  # whose KV heads the groups have
    readers: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        integer("page_size", self.page_size, least=1)
        if self.dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype is {self.dtype}; it must be one of {', '.join(DTYPES)}")
        stored = sorted(integer("layer", layer) for group in self._attended for layer in group.layers)
        layers = sorted(stored + [integer("layer of readers", layer) for layer, _ in self.readers])
        if not stored or layers != list(range(len(layers))):
            also = ", or read another layer" if self.readers else ""
            raise InvalidArgument(f"groups hold layers {stored}; each of 0 … n-1 must stand in exactly one group{also}")
        for index, group in enumerate(self.groups):
            for name in ("num_kv_heads", "head_dim"):
                integer(f"{name} of group {index}", getattr(group, name), least=1)
            if not isinstance(group.keeps, Span):
                raise InvalidArgument(f"keeps of group {index} is {group.keeps!r}; a Span is accepted, as {ALL}")
            if group.keeps.chunk is not None and group.keeps.chunk % self.page_size:
                raise InvalidArgument(
                    f"keeps of group {index} is chunks of {group.keeps.chunk} positions; a multiple of page_size, "
                    f"{self.page_size}, is accepted"
                )
            _check_latent(index, group)
        self._check_index_keys()
        self._check_readers()
        self._check_given()
        if self.scales is not None:
            if self.has_latents:
                raise InvalidArgument(
                    "scales are given, but the layout has groups with latents; only K and V have 8 bits"
                )
            self.scales.check([self.groups[group].num_kv_heads for group, _ in self.layer_index.values()])

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the pools' elements."""
        return self.dtype if self.scales is None else FP8

    @property
    def num_layers(self) -> int:
        """Those that store K and V, or latents, and readers."""
        return sum(len(group.layers) for group in self._attended) + len(self.readers)

    @property
    def layer_index(self) -> dict[int, tuple[int, int]]:
        """Of each layer, in order, the group that stores its K and V, or latents, and its index there. A reader has
        those of the layer that it reads."""
        stored = self._index_of(lambda group: group.top_k is None)
        return dict(sorted((stored | {layer: stored[of] for layer, of in self.readers}).items()))

    @property
    def index_keys(self) -> dict[int, tuple[int, int]]:
        """Of each layer with index keys, in order, their group and its index there."""
        return self._index_of(lambda group: group.top_k is not None)

    def top_k_of(self, group: LayerGroup) -> int | None:
        """How many positions a query of the group's layers attends to at most; None: all that the group keeps."""
        found = (one.top_k for one in self.groups if one.top_k is not None and set(one.layers) <= set(group.layers))
        return next(found, None)

    @property
    def has_encoder(self) -> bool:
        """Whether sequences begin with the positions of an encoder; see Given."""
        return any(group.keeps.given for group in self.groups)

    @property
    def drops_past(self) -> bool:
        """Whether pages of some group are let go of as a sequence grows."""
        return any(group.keeps.drops_past for group in self.groups)

    def page_shape(self, group: int) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, planes, num_kv_heads, page_size, head_dim]."""
        of_group = self.groups[group]
        return (len(of_group.layers), of_group.planes, of_group.num_kv_heads, self.page_size, of_group.head_dim)

    def page_bytes(self, group: int) -> int:
        return math.prod(self.page_shape(group)) * self.stored_dtype.itemsize

    @property
    def has_latents(self) -> bool:
        return any(group.latent_rank is not None for group in self.groups)

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
    def _attended(self) -> list[LayerGroup]:
        return [group for group in self.groups if group.top_k is None]

    def _index_of(self, chosen: Callable[[LayerGroup], bool]) -> dict[int, tuple[int, int]]:
        groups = ((index, group) for index, group in enumerate(self.groups) if chosen(group))
        return dict(sorted((layer, (index, i)) for index, group in groups for i, layer in enumerate(group.layers)))

    def _check_index_keys(self) -> None:
        """A group of index keys serves some layers of one group with latents, the first among them; none is served
        twice."""
        served: set[int] = set()
        for index, keys in enumerate(self.groups):
            if keys.top_k is None:
                continue
            integer(f"top_k of group {index}", keys.top_k, least=1)
            of = [set(group.layers) for group in self._attended if group.latent_rank is not None]
            its = next((layers for layers in of if set(keys.layers) <= layers), set())
            if keys.latent_rank is None or not keys.layers or not its or min(its) not in keys.layers or served & its:
                raise InvalidArgument(
                    f"group {index} has index keys of layers {list(keys.layers)}; it must have a latent_rank, layers "
                    "of one group with latents, the first of these among them, and be alone in that"
                )
            served |= its

    @cached_property
    def fingerprint(self) -> int:
        """64 bits that are equal exactly for equal layouts; checked when a position map is negotiated."""
        text = repr((self.page_size, str(self.dtype), self.groups, self.scales, self.shard, self.readers))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _check_given(self) -> None:
        """Layers that attend to an encoder's entries stand behind those that keep their own, which have no latents."""
        if not self.has_encoder:
            return
        given = {layer for group in self.groups if group.keeps.given for layer in group.layers}
        if self.groups[0].keeps.given or self.has_latents or {of for _, of in self.readers} & given:
            raise InvalidArgument(
                f"layers {sorted(given)} keep an encoder's entries; a first group that keeps its own, K and V in all "
                "groups, and no readers of these layers are accepted"
            )

    def _check_readers(self) -> None:
        ranks = {layer: group.latent_rank for group in self.groups for layer in group.layers}
        for layer, of in self.readers:
            if of not in ranks or of > layer or ranks[of] is not None:
                raise InvalidArgument(
                    f"readers has ({layer}, {of}): layer {layer} would read layer {of}; an earlier layer that stores K "
                    "and V is accepted"
                )


def _check_latent(index: int, group: LayerGroup) -> None:
    if group.latent_rank is None:
        return
    rank = integer(f"latent_rank of group {index}", group.latent_rank)
    if not 1 <= rank < group.head_dim:
        raise InvalidArgument(f"group {index} has latent_rank {rank}; 1 … {group.head_dim - 1} are accepted")
    if group.num_kv_heads != 1:
        raise InvalidArgument(f"group {index} has latents and num_kv_heads {group.num_kv_heads}; it must be 1")
    if group.keeps != ALL:
        raise InvalidArgument(f"group {index} has latents and keeps {group.keeps}; it must be {ALL}")
