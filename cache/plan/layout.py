"""What one page of KV looks like: the contract that both sides of a transfer must share."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cache.plan.spans import ALL, Paging, Span

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose KV entries are alike and share one pool and one page table.

    A pool is one tensor `[num_pages, len(layers), planes, num_kv_heads, page_entries, head_dim]`: a page is one
    contiguous span that holds all layers of the group. There are two planes, K at 0 and V at 1. keeps: which entries
    later queries need; pages of others are let go of.

    latent_rank: of multi-head latent attention (DeepSeek-V2), whose entries are one plane of one head: that many
    numbers of which every head's K and V are made, then the rotated part of K that the heads share.

    top_k: the entries are index keys (DeepSeek-V3.2), kept beside the latents of the same layers: a query attends to
    the top_k positions that it scores highest by them. latent_rank then counts the numbers that are not rotated.

    num_planes: 1 without latent_rank: K and V are the same numbers of one head (DeepSeek-V4), stored once.

    beside: the entries are something else that the layers keep beside what another group keeps of them, as compressed
    KV or what that is made of: see Attention.store. Such a group may have one plane, an element type of its own
    (None: the layout's) and a span of one entry for several positions. With top_k these are index keys of compressed
    entries, see CompressedGroups.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    keeps: Span = ALL
    latent_rank: int | None = None
    top_k: int | None = None
    beside: bool = False
    num_planes: int | None = None
    dtype: torch.dtype | None = None

    @property
    def planes(self) -> int:
        return self.num_planes or (2 if self.latent_rank is None else 1)

    @property
    def shares_planes(self) -> bool:
        """Whether its layers attend to K and V that are the same numbers."""
        return not self.beside and self.latent_rank is None and self.num_planes == 1


class CompressedGroups(NamedTuple):
    """The groups beside that of a layer with one plane which hold its compressed KV (DeepSeek-V4).

    inputs: of what entries are made, values in plane 0 and gates in plane 1, for the positions of one entry, or, where
    entries overlap, of two. entries: compressed KV, one for several positions. keys: index keys of these, by which a
    query chooses top_k of them; None: a query attends to all.
    """

    inputs: int
    entries: int
    keys: int | None
    top_k: int | None


@dataclass(frozen=True)
class KVLayout:
    """Groups of layers, positions per page and element type of a paged KV cache.

    page_size: positions of a page, of groups with an entry for each. A page of others covers the fewest positions, of
    which are whole pages and whole entries. dtype: of K and V as they are computed. scales: K and V are stored as
    float8_e4m3fn, divided by these; None: as they are. readers: pairs of a layer that stores nothing and the earlier
    layer whose K and V it reads. Raises InvalidArgument when a field is out of range or a layer stands in two groups,
    but for index keys.
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
            self._check_beside(index, group)
            _check_shared(index, group)
        self._check_index_keys()
        self._check_compressed()
        self._check_readers()
        self._check_given()
        if self.scales is not None:
            if self.has_latents:
                raise InvalidArgument(
                    "scales are given, but the layout has groups with latents; only K and V have 8 bits"
                )
            if any(group.beside or group.shares_planes for group in self.groups):
                raise InvalidArgument(
                    "scales are given, but the layout has groups beside others, or with one plane; None is accepted"
                )
            self.scales.check([self.groups[group].num_kv_heads for group, _ in self.layer_index.values()])

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the elements of pools whose groups have no dtype of their own."""
        return self.dtype if self.scales is None else FP8

    def stored_dtype_of(self, group: int) -> torch.dtype:
        """Of a pool's elements."""
        return self.groups[group].dtype or self.stored_dtype

    @cached_property
    def paging(self) -> tuple[Paging, ...]:
        """Of each group."""
        every = [group.keeps.every for group in self.groups]
        return tuple(Paging(one, math.lcm(one, self.page_size) // one) for one in every)

    @cached_property
    def grain(self) -> int:
        """Positions of the coarsest page: the fewest that are whole pages of every group. Prefixes are shared so."""
        return math.lcm(*(paging.positions for paging in self.paging))

    @property
    def pages_together(self) -> tuple[int, ...]:
        """Of each group, how many times page_size positions one page covers."""
        return tuple(paging.positions // self.page_size for paging in self.paging)

    def first_page_index(self, group: int, query: int) -> int:
        """The first page index that a group keeps when the next query stands at position `query`."""
        return self.groups[group].keeps.first_page_index(query, self.paging[group].entries, self.grain)

    def most_pages(self, group: int, num_tokens: int, longest_append: int) -> int:
        """See Span."""
        keeps = self.groups[group].keeps
        return keeps.most_pages(num_tokens, longest_append, self.paging[group].entries, self.grain)

    @property
    def num_layers(self) -> int:
        """Those that store K and V, or latents, and readers."""
        return sum(len(group.layers) for group in self._attended) + len(self.readers)

    @property
    def layer_index(self) -> dict[int, tuple[int, int]]:
        """Of each layer, in order, the group that stores its K and V, or latents, and its index there. A reader has
        those of the layer that it reads."""
        stored = self._index_of(lambda group: group.top_k is None and not group.beside)
        return dict(sorted((stored | {layer: stored[of] for layer, of in self.readers}).items()))

    @property
    def index_keys(self) -> dict[int, tuple[int, int]]:
        """Of each layer with index keys, in order, their group and its index there."""
        return self._index_of(lambda group: group.top_k is not None and not group.beside)

    @cached_property
    def compressed(self) -> dict[int, CompressedGroups]:
        """Of each layer with compressed KV the groups that hold it."""
        shared = {layer for group in self._attended if group.shares_planes for layer in group.layers}
        kinds: dict[int, dict[str, int]] = {}
        for index, group in enumerate(self.groups):
            for layer in shared.intersection(group.layers if group.beside else ()):
                kinds.setdefault(layer, {})[_kind_of(group)] = index
        top_k = [group.top_k for group in self.groups]
        return {
            layer: CompressedGroups(
                of["inputs"], of["entries"], of.get("keys"), top_k[of["keys"]] if "keys" in of else None
            )
            for layer, of in sorted(kinds.items())
        }

    def top_k_of(self, group: LayerGroup) -> int | None:
        """How many positions a query of the group's layers attends to at most; None: all that the group keeps."""
        found = (one.top_k for one in self.groups if one.top_k is not None and set(one.layers) <= set(group.layers))
        return None if group.beside or group.shares_planes else next(found, None)

    @property
    def has_encoder(self) -> bool:
        """Whether sequences begin with the positions of an encoder; see Given."""
        return any(group.keeps.given for group in self.groups)

    @property
    def drops_past(self) -> bool:
        """Whether pages of some group are let go of as a sequence grows."""
        return any(group.keeps.drops_past for group in self.groups)

    def page_shape(self, group: int) -> tuple[int, int, int, int, int]:
        """Shape of one page: [layers, planes, num_kv_heads, page_entries, head_dim]."""
        of, entries = self.groups[group], self.paging[group].entries
        return (len(of.layers), of.planes, of.num_kv_heads, entries, of.head_dim)

    def page_bytes(self, group: int) -> int:
        return math.prod(self.page_shape(group)) * self.stored_dtype_of(group).itemsize

    def entry_bytes(self, group: int) -> int:
        """Of one entry in all layers."""
        return self.page_bytes(group) // self.paging[group].entries

    @property
    def has_latents(self) -> bool:
        return any(group.latent_rank is not None for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one position takes over all groups, while all of them hold it; of an entry for several its
        share, rounded down over all."""
        pages = ((self.page_bytes(group), paging.positions) for group, paging in enumerate(self.paging))
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
    def _attended(self) -> list[LayerGroup]:
        return [group for group in self.groups if group.top_k is None and not group.beside]

    def _index_of(self, chosen: Callable[[LayerGroup], bool]) -> dict[int, tuple[int, int]]:
        groups = ((index, group) for index, group in enumerate(self.groups) if chosen(group))
        return dict(sorted((layer, (index, i)) for index, group in groups for i, layer in enumerate(group.layers)))

    def _check_index_keys(self) -> None:
        """A group of index keys serves some layers of one group with latents, the first among them; none is served
        twice."""
        served: set[int] = set()
        for index, keys in enumerate(self.groups):
            if keys.top_k is None or keys.beside:
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

    def _check_beside(self, index: int, group: LayerGroup) -> None:
        """Only a group beside others has what those that are attended to cannot have, and its layers are theirs."""
        if not group.beside:
            if group.dtype is not None:
                raise InvalidArgument(
                    f"dtype of group {index} is {group.dtype}; None is accepted but in groups beside others"
                )
            if group.keeps.every > 1:
                raise InvalidArgument(
                    f"keeps of group {index} is {group.keeps}, but beside is False; a span with an entry for each "
                    "position is accepted"
                )
            return
        if group.latent_rank is not None or (group.top_k is not None and group.keeps.every == 1):
            raise InvalidArgument(
                f"group {index} stands beside others; latent_rank must be None, and top_k where each position has an "
                "entry"
            )
        if group.num_planes not in (None, 1, 2):
            raise InvalidArgument(f"num_planes of group {index} is {group.num_planes}; 1 and 2 are accepted")
        if group.dtype is not None and group.dtype not in DTYPES.values():
            raise InvalidArgument(f"dtype of group {index} is {group.dtype}; it must be one of {', '.join(DTYPES)}")
        stored = {layer for one in self._attended for layer in one.layers}
        if not group.layers or not set(group.layers) <= stored or len(set(group.layers)) < len(group.layers):
            raise InvalidArgument(
                f"group {index} stands beside others with layers {list(group.layers)}; some of {sorted(stored)}, each "
                "once, are accepted"
            )

    def _check_compressed(self) -> None:
        """The groups beside those with one plane hold compressed KV: see CompressedGroups."""
        for attended in self._attended:
            for layer in attended.layers if attended.shares_planes else ():
                own = [group for group in self.groups if group.beside and layer in group.layers]
                kinds = {_kind_of(group): group for group in own}
                if own and not _fits(attended, kinds, len(own)):
                    raise InvalidArgument(
                        f"layer {layer}, of K and V in one plane, has groups beside it that keep "
                        f"{[str(group.keeps) for group in own]}; one that keeps an entry for several positions is "
                        "accepted, with a window of one or two entries for what these are made of"
                    )
        kept = {of.keys for of in self.compressed.values()}
        for index, group in enumerate(self.groups):
            if group.beside and group.top_k is not None and index not in kept:
                raise InvalidArgument(f"top_k of group {index} is {group.top_k}, but its layers have no compressed KV")

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
        beside = [index for index, group in enumerate(self.groups) if group.beside]
        if beside:  # a border is counted in pages of page_size positions, and these groups may have others
            raise InvalidArgument(
                f"layers {sorted(given)} keep an encoder's entries, but groups {beside} stand beside others; a layout "
                "has one of both"
            )
        if self.groups[0].keeps.given or self.has_latents or {of for _, of in self.readers} & given:
            raise InvalidArgument(
                f"layers {sorted(given)} keep an encoder's entries; a first group that keeps its own, K and V in all "
                "groups, and no readers of these layers are accepted"
            )

    def _check_readers(self) -> None:
        reads = [group for group in self._attended if group.latent_rank is None and not group.shares_planes]
        readable = {layer for group in reads for layer in group.layers}
        for layer, of in self.readers:
            if of not in readable or of > layer:
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


def _check_shared(index: int, group: LayerGroup) -> None:
    """Of a group whose K and V are the same numbers."""
    if group.beside or group.num_planes is None:
        return
    if not group.shares_planes or group.num_kv_heads != 1 or group.keeps.window is None:
        raise InvalidArgument(
            f"num_planes of group {index} is {group.num_planes}, with num_kv_heads {group.num_kv_heads}, keeps "
            f"{group.keeps} and latent_rank {group.latent_rank}; None is accepted, or 1 with one head, a window and no "
            "latents"
        )


def _kind_of(group: LayerGroup) -> str:
    """Of a group that stands beside one with K and V in one plane, see CompressedGroups."""
    if group.keeps.every == 1:
        return "inputs"
    return "entries" if group.top_k is None else "keys"


def _fits(attended: LayerGroup, kinds: Mapping[str, LayerGroup], count: int) -> bool:
    """Whether `count` groups beside that of a layer, of these kinds, are what CompressedGroups says."""
    inputs, entries, keys = kinds.get("inputs"), kinds.get("entries"), kinds.get("keys")
    if inputs is None or entries is None or count != len(kinds):
        return False
    made = [entries] if keys is None else [entries, keys]
    every, width = entries.keeps.every, sum(group.head_dim for group in made)
    overlap, left = divmod(inputs.keeps.window or 0, every)
    alike = all(one.planes == 1 and one.num_kv_heads == 1 and one.keeps.every == every for one in made)
    own = inputs.planes == 2 and inputs.num_kv_heads == 1 and inputs.head_dim == overlap * width
    return alike and own and left == 0 and overlap in (1, 2) and entries.head_dim == attended.head_dim
