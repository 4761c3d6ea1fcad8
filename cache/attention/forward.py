"""A forward: what is asked for, and how a model's layers attend in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from tandem.cache.attention.compressed import CompressedForward
from tandem.cache.attention.compressed_tokens import TokenForward
from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import (
    QKV,
    Compression,
    Entries,
    GroupPlan,
    Index,
    Latents,
    Part,
    Query,
    SharedKV,
    StepPages,
)
from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.cache.kinds.compressed import CompressedGroups, compressed_groups
from tandem.cache.kinds.index import index_keys
from tandem.cache.kinds.kind import kind_of
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.tables import TokenLayout
from tandem.cache.plan.temperature import Temperature
from tandem.cache.store.copies import Arrivals

Parents = Sequence[int] | Int64Array


class LayerIndex(NamedTuple):
    """The group of each layer of a model, and the layer's index in it.

    places: for each layer its group and its index there; a reader has those of the layer that it reads. readers: for
    each layer that stores nothing, the layer that it reads. index_keys: for each layer with index keys, their group and
    its index there. beside: for each group that stands next to others, its layers and the index of each. given: the
    layers that keep an encoder's entries. compressed: for each layer with compressed KV, the groups that hold it.
    """

    places: Mapping[int, tuple[int, int]]
    readers: Mapping[int, int]
    index_keys: Mapping[int, tuple[int, int]]
    beside: Mapping[int, Mapping[int, int]]
    given: frozenset[int] = frozenset()
    compressed: Mapping[int, CompressedGroups] = MappingProxyType({})

    @classmethod
    def of(cls, layout: KVLayout) -> "LayerIndex":
        beside = {
            index: {layer: place for place, layer in enumerate(group.layers)}
            for index, group in enumerate(layout.groups)
            if kind_of(group).takes is Entries
        }
        given = (layer for group in layout.groups if group.keeps.given for layer in group.layers)
        places = (layout.layer_index, dict(layout.readers), index_keys(layout), beside)
        return cls(*places, frozenset(given), compressed_groups(layout))


class Batch(NamedTuple):
    """What one forward computes: the next append_lengths[i] ≥ 1 positions of sequence seq_ids[i], any number of each.
    So prompt chunks, decodes and drafts that are verified stand in one batch.

    rope_lengths: dynamic RoPE rotates a token by the length of its sequence, as transformers does. For a prompt in
    chunks that is the whole prompt's length. None, or where smaller: the length after this append.

    token_tree_parents: None, or an entry for each sequence. None for a plain one; else, for each new position, the node
    that it follows in the sequence's token tree, or -1 for a root. Nodes count over the whole open tree, which later
    forwards may grow; parents come before their children, and at most 256 fit. Until commit_token_tree the sequence
    takes no plain forward; it is not forked, published, sent or received into. pop takes back the last nodes. Sequences
    that slide or are being sent take no trees. In layers that attend in chunks a tree has to end within its chunk.

    push: whether the forward sends what is marked; if not, send_cached() or a later forward does.

    scratch: the number of last positions of each sequence that will be popped, including this forward's. Positions that
    a query in place of the first one sees stay.

    drafted: the new positions of a sequence but the first are drafts. Until the sequence's next
    forward, or another with drafts, pop may take back any of them, also where a group keeps states.

    without_states: layers that keep states take no part, and the new positions will be popped.

    encodes: the forward stores the encoder's entries of empty sequences, in a layout with an encoder, and nothing else
    but push is given. Its new positions are the encoder's, padded to whole pages. The caller calls
    attention.store_given() once for each layer that keeps them, in order. Later forwards append after the border, and
    their read() of such a layer attends to all encoder_len entries.
    """

    seq_ids: Sequence[int] | Int64Array
    append_lengths: Sequence[int] | Int64Array | None = None  # None: one each
    rope_lengths: Sequence[int] | Int64Array | None = None
    token_tree_parents: Sequence[Parents | None] | None = None
    push: bool = True
    scratch: int = 0
    drafted: bool = False
    without_states: bool = False
    encodes: bool = False


@dataclass(slots=True, eq=False)
class Attention:
    """How the layers of a model attend in one forward, eager or captured. See CachedAttention of tandem.workers.models.

    It counts the layers that ran, so that none is taken for computed that was not.
    """

    groups: Sequence[GroupAttention]
    plans: Sequence[GroupPlan]
    layers: LayerIndex
    standing: Standing | None  # of the sequences when the forward was planned; None in graph buffers
    locate: Callable[[], Tensor] | None = None  # int64 [T]: where each new token stands in its text, on the device
    encodes: bool = False  # the forward stores an encoder's entries, and nothing else
    compressed: CompressedForward | None = None  # of layouts with compressed KV
    by_token: TokenForward | None = None  # of layouts with K and V in one plane, in place of `compressed`
    arrivals: Arrivals | None = None  # of pages that layers wait for
    ran: int = 0  # a bit for each layer that has stored K and V, or latents
    stored_beside: set[tuple[int, int]] = field(default_factory=set)  # groups and layers whose store() ran
    _chosen: Tensor | None = None  # by the last layer with index keys
    _factors: Tensor | None = None
    _reads: dict[tuple[int, bool], Any] = field(default_factory=dict)  # plans of read_part, by group and causality

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        norm: HeadNorm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """o [T, num_q_heads, head_dim]: rotates q and k, stores K and V here and with receivers, attends causally.

        q is [T, num_q_heads, head_dim], k and v are [T, num_kv_heads, head_dim], not rotated, left as they are; any
        strides, but 1 in the last dimension. Called once for each layer, in order, under torch.inference_mode, before a
        sequence of the forward is shortened or removed.

        sinks: [num_q_heads], learned logits that take their share of each softmax and give nothing (gpt_oss). norm: of
        q and k, before they are rotated. out: see QKV.
        """
        return self.run(layer, QKV(q, k, v, sinks, norm, out))

    def run(self, layer: int, x: Any) -> Tensor:
        """Runs a layer of any kind that needs no call of its own, like attend(). x: see ServedKind.takes."""
        group, plan, index = self._find(layer)
        kind = group.kind
        if type(x) is not kind.takes or kind.needs_call:
            raise InvalidArgument(f"layer is {layer}, which keeps {kind.holds}; {kind.serves}() serves it")
        if layer in self.layers.readers:
            of = self.layers.readers[layer]
            raise InvalidArgument(f"layer is {layer}, which reads layer {of} and stores nothing; read() serves it")
        self._check_side(layer, stores_given=False)
        kind.check_inputs(plan.num_tokens, x, group.site)
        output = group.run(plan, index, x)
        self.ran |= 1 << layer
        return output

    def recur(self, layer: int, x: RecurrentInputs) -> Tensor:
        """o [T, heads, output_dim] of a layer that keeps a state, which the new tokens change: see run()."""
        return self.run(layer, x)

    def store_given(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v [T, num_kv_heads, head_dim] of an encoder's positions, not rotated. The padding's values
        mean nothing."""
        group, plan, index = self._find(layer)
        self._check_side(layer, stores_given=True)
        group.check(plan.num_tokens, QKV(k, k, v))
        group.store(plan, index, k, v)
        self.ran |= 1 << layer

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """o [T, num_heads, value_dim]: attends like attend(), in a layer with latents (tandem.cache.plan.latent).

        q [T, num_heads, key_dim + rotated] and keys [T, rotated] are not rotated yet; with latents [T, rank]
        they may be overwritten. Chooses for each sequence whether to absorb `up` or to expand what is stored.

        choice: of a layer with index keys, by which the queries of longer sequences choose what they attend to. Layers
        of such a layout without index keys attend to what the last one with them chose.
        """
        group, plan, index = self._find(layer)
        if group.kind.takes is not Latents:
            raise InvalidArgument(f"layer is {layer}, which keeps no latents; attend() serves it")
        x = Latents(q, latents, keys, up)
        group.check(plan.num_tokens, x)
        chosen = self._choose(layer, choice)
        output = group.run(plan, index, x if chosen is None else x._replace(chosen=chosen))
        self.ran |= 1 << layer
        return output

    def attend_shared(
        self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor, compression: Compression | None = None
    ) -> Tensor:
        """o [T, num_heads, head_dim]: attends like attend(), in a layer whose K and V are one plane of one head.

        q [T, num_heads, head_dim] and kv [T, 1, head_dim] are not rotated; sinks are as for attend(). RoPE rotates the
        last numbers of a head, neighbours as one pair, and o is rotated back.

        compression: of a layer with groups of compressed KV: inputs and entries are stored here and with receivers.
        Each token attends to its window, and to the complete entries before it, or to the best top_k.
        """
        group, plan, index = self._find(layer)
        if group.kind.takes is not SharedKV:
            raise InvalidArgument(f"layer is {layer}, whose K and V are not in one plane; attend() serves it")
        x, of = SharedKV(q, kv, sinks), self.layers.compressed.get(layer)
        group.check(plan.num_tokens, x)
        if (of is None) != (compression is None):
            raise InvalidArgument(
                f"layer is {layer}; compression must be given exactly where a layer has compressed KV beside its window"
            )
        if self.by_token is not None:
            output = self._attend_by_token(of, group.group, layer, index, x, compression)
            self.ran |= 1 << layer
            return output
        if of is not None and compression is not None and self.compressed is not None:
            beside = [0 if one is None else self.layers.beside[one][layer] for one in (of.inputs, of.entries, of.keys)]
            places = (beside[0], beside[1], beside[2])
            x = x._replace(extra=self.compressed.extend(of, group.group, layer, places, compression, self.store))
        output = group.run(plan, index, x)
        self.ran |= 1 << layer
        return output

    def _attend_by_token(
        self,
        of: CompressedGroups | None,
        group: int,
        layer: int,
        index: int,
        x: SharedKV,
        compression: Compression | None,
    ) -> Tensor:
        assert self.by_token is not None
        beside = () if of is None else (of.inputs, of.entries, of.keys)
        inputs, entries, keys = [0 if one is None else self.layers.beside[one][layer] for one in beside] or [0, 0, 0]
        self.stored_beside.update((one, layer) for one in beside if one is not None)
        return self.by_token.attend(of, group, (index, inputs, entries, keys), x, compression)

    def _choose(self, layer: int, choice: Index | None) -> Tensor | None:
        """The positions for a layer's queries, see Latents. Without index keys it takes the previous layer's."""
        if choice is None and layer in self.layers.index_keys:
            raise InvalidArgument(f"choice is None; layer {layer} has index keys, by which its queries must choose")
        if choice is not None and layer not in self.layers.index_keys:
            raise InvalidArgument(f"choice is given; layer {layer} has no index keys, so it must be None")
        if choice is not None:
            index, place = self.layers.index_keys[layer]
            group, plan = self.groups[index], self.plans[index]
            group.check(plan.num_tokens, choice)
            self._chosen = group.run(plan, place, choice)
        return self._chosen

    def store(self, group: int, layer: int, k: Tensor, v: Tensor | None = None) -> None:
        """Stores what a layer keeps in `group`, which stands next to others, here and with receivers.

        k [n, num_kv_heads, head_dim] of each of the group's new_entries(), and v where it has two planes, in the
        group's dtype. Called once for each such group and layer, in order. Where n is 0 it sends what is cached.
        """
        place = self._check_beside(group, layer)
        self._find(layer)
        own, plan = self.groups[group], self.plans[group]
        entries = Entries(k, v)
        own.check(plan.num_tokens, entries)
        own.run(plan, place, entries)
        self.stored_beside.add((group, layer))

    def new_entries(self, group: int) -> TokenLayout:
        """Returns the entries that a forward's tokens complete in a layer group, packed like tokens. `owners`: the
        forward's sequences that they belong to. `positions`: their indices in these sequences. In a group with an
        entry for each position they are the tokens."""
        tokens = self.plans[group].tokens if 0 <= group < len(self.plans) else None
        if tokens is None:
            raise InvalidArgument(f"group is {group}; outside graph buffers it must be from 0 to {len(self.plans) - 1}")
        return tokens

    def _check_beside(self, group: int, layer: int) -> int:
        """The index of a layer in a group that stands next to others."""
        if group not in self.layers.beside or layer not in self.layers.beside[group]:
            accepted = {one: list(layers) for one, layers in self.layers.beside.items()}
            raise InvalidArgument(
                f"group is {group} and layer {layer}; groups beside others have these layers: {accepted}"
            )
        return self.layers.beside[group][layer]

    def read(
        self,
        layer: int,
        q: Tensor,
        sinks: Tensor | None = None,
        norm: HeadNorm | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attends like attend(), but without k and v, to what `layer` has stored in this forward and before. A reader
        attends to what the layer that it reads has stored. Stores nothing, and may be called any number of times."""
        x = Query(q, sinks, norm, out)
        group, plan, index = self._find_stored(layer, x)
        return group.read(plan, index, x)

    def read_part(self, layer: int, q: Tensor, *, causal: bool = True) -> Part:
        """Attends like read(), and also returns the log-sum-exp of the scores, for merge().

        causal: False: each token sees all positions of its sequence, also those after its own; only in layers that
        keep all. InvalidArgument for sequences that slide or have an open token tree.
        """
        group, plan, index = self._find_stored(layer, Query(q))
        if plan.tokens is None:
            raise InvalidArgument("the forward is in graph buffers; read_part is for those without")
        if plan.sliding is not None or plan.tokens.trees is not None:
            raise InvalidArgument("the forward has sequences that slide or have a token tree; read_part takes others")
        if layer in self.layers.given:
            raise InvalidArgument(f"layer is {layer}, which keeps an encoder's entries; read() serves it")
        if not causal and group.drops_past:
            raise InvalidArgument(f"causal is False, but layer {layer} drops its past; it must be True there")
        key = self.layers.places[layer][0], causal
        if key not in self._reads:
            self._reads[key] = group.backend.plan_read(plan.tokens, plan.tables, causal=causal)
        rotated = q if plan.rotation is None else plan.rotation.apply(q)
        return group.backend.read_part(self._reads[key], index, rotated)

    def step_pages(self, layers: range) -> StepPages | None:
        """Returns the pages for a decode megakernel, which then computes these layers. None where each layer must call
        attend(), for example where the layers are not consecutive in one group."""
        group, first = self.layers.places[layers[0]]
        if self.layers.readers or not self.plans[group].captured:
            return None
        if any(self.layers.places[layer] != (group, place) for place, layer in enumerate(layers, first)):
            return None
        return self.plans[group].own.step_pages(self.plans[group], range(first, first + len(layers)))

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention; a model has one rule."""
        if self._factors is None:
            if self.locate is None:
                raise InvalidArgument("the forward knows no positions; PagedKVCache.begin makes one that does")
            self._factors = rule.factors(self.locate())
        return self._factors

    def check_complete(self, layers: range | None = None) -> None:
        """Raises InvalidArgument when a layer among `layers` (None: all) that stores K and V never ran."""
        given = self.layers.given
        own = given if self.encodes else self.layers.places.keys() - given
        stored = [layer for layer in layers or sorted(own) if layer not in self.layers.readers]
        missing = [layer for layer in stored if not self.ran >> layer & 1]
        if missing:
            raise InvalidArgument(f"layers {missing} of the plan never ran; commit() comes after the last one")
        for group, places in self.layers.beside.items():
            wanted = set(places).intersection(layers or places)
            left = sorted(layer for layer in wanted if (group, layer) not in self.stored_beside)
            if left:
                raise InvalidArgument(
                    f"layers {left} have stored none of their {self.plans[group].num_tokens} new entries of group "
                    f"{group}; commit() comes after store()"
                )

    def _check_side(self, layer: int, *, stores_given: bool) -> None:
        """InvalidArgument unless the forward is of the kind that the layer's call is for."""
        if stores_given and (layer not in self.layers.given or not self.encodes):
            raise InvalidArgument(f"layer is {layer}; a batch with encodes makes a forward that stores what it keeps")
        if not stores_given and (layer in self.layers.given or self.encodes):
            raise InvalidArgument(f"layer is {layer}; begin() makes forwards that attend, in layers of their own")

    def _find(self, layer: int) -> tuple[GroupAttention, GroupPlan, int]:
        """A layer's group, what was planned of that, and the layer's index there."""
        if self.standing is not None:
            self.standing.check()
        if self.arrivals is not None:
            self.arrivals.wait(layer)
        places = self.layers.places
        if layer not in places:
            accepted = ", ".join(map(str, sorted(places)))
            raise InvalidArgument(f"layer is {layer}; it must be one of {accepted}")
        group, index = places[layer]
        return self.groups[group], self.plans[group], index

    def _find_stored(self, layer: int, x: Query) -> tuple[GroupAttention, GroupPlan, int]:
        """_find() of a layer that has stored what it reads in this forward; x is checked."""
        group, plan, index = self._find(layer)
        if not group.backend.capabilities.reads:
            raise InvalidArgument(f"layer is {layer}, whose kernels do not attend without appending; attend() appends")
        group.kind.check_query(plan.num_tokens, x, group.site)
        of = self.layers.readers.get(layer, layer)
        if layer in self.layers.given:
            if self.encodes:
                raise InvalidArgument(f"layer is {layer}; begin() makes forwards that attend to an encoder's entries")
        elif not self.ran >> of & 1:
            raise InvalidArgument(f"layer is {layer}, but layer {of}, which stores what it reads, has not run yet")
        return group, plan, index


NO_ATTENTION = Attention((), (), LayerIndex({}, {}, {}, {}), None)
"""The attention of a forward in graph buffers, whose layers the graph computes."""
