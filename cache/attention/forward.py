"""A forward: what is asked for, what was planned of it, and how a model's layers attend in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import QKV, GroupPlan, Index, Latents, StepPages
from tandem.cache.pages.send_marks import Sent
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.attention_inputs import AttentionInputs, IndexInputs, LatentInputs
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.tables import TokenLayout
from tandem.cache.plan.temperature import Temperature

if TYPE_CHECKING:
    from tandem.cache.attention.graph_buffers import GraphBuffers

Parents = Sequence[int] | Int64Array
LayerIndex = Mapping[int, tuple[int, int]]
"""Of each layer its group, and its index there."""


class Batch(NamedTuple):
    """What one forward computes: the next append_lengths[i] ≥ 1 positions of sequence seq_ids[i], any number of each.

    So prompt chunks, decodes and drafts that are verified stand in one batch. See PagedKVCache.begin_forward for
    rope_lengths, token_tree_parents and push.

    scratch: so many of the last positions of each sequence will be popped, with those of this forward. What a query
    in the place of the first of them sees stays.
    """

    seq_ids: Sequence[int] | Int64Array
    append_lengths: Sequence[int] | Int64Array | None = None  # None: one each
    rope_lengths: Sequence[int] | Int64Array | None = None
    token_tree_parents: Sequence[Parents | None] | None = None
    push: bool = True
    scratch: int = 0


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
    index_keys: LayerIndex = field(default_factory=dict)  # of layers that choose positions
    ran: int = 0  # a bit for each layer
    _chosen: Tensor | None = None  # by the last of these layers
    _factors: Tensor | None = None

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        """See PagedKVCache.attention. norm: of q and k, before they are rotated."""
        group, plan, index = self._find(layer)
        if not isinstance(group.inputs, AttentionInputs):
            raise InvalidArgument(f"layer is {layer}, which keeps latents; latent_attention serves it")
        group.inputs.check(plan.num_tokens, q, k, v, sinks)
        output = group.run(plan, index, QKV(q, k, v, sinks, norm))
        self.ran |= 1 << layer
        return output

    def attend_latents(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections, choice: Index | None = None
    ) -> Tensor:
        """See PagedKVCache.latent_attention."""
        group, plan, index = self._find(layer)
        if not isinstance(group.inputs, LatentInputs):
            raise InvalidArgument(f"layer is {layer}, which keeps no latents; attention serves it")
        group.inputs.check(plan.num_tokens, q, latents, keys, up)
        chosen = self._choose(layer, choice)
        output = group.run(plan, index, Latents(q, latents, keys, up, chosen))
        self.ran |= 1 << layer
        return output

    def _choose(self, layer: int, choice: Index | None) -> Tensor | None:
        """What a layer's queries attend to, see Latents: a layer without index keys takes what the one before took."""
        if (choice is not None) != (layer in self.index_keys):
            accepted = "one" if choice is None else "None"
            raise InvalidArgument(
                f"choice is {'None' if choice is None else 'given'} for layer {layer}; {accepted} is "
                "accepted, as the layout has index keys for some layers"
            )
        if choice is not None:
            index, place = self.index_keys[layer]
            group, plan = self.groups[index], self.plans[index]
            assert isinstance(group.inputs, IndexInputs)
            group.inputs.check(plan.num_tokens, *choice)
            self._chosen = group.run(plan, place, choice)
        return self._chosen

    def step_pages(self, layers: range) -> StepPages | None:
        """For a decode megakernel, which then computes these layers; None where each layer must call attend(), as where
        they are not all those of one group."""
        group = self.layers[layers[0]][0]
        if not self.plans[group].captured:
            return None
        if [layer for layer, (its_group, _) in self.layers.items() if its_group == group] != list(layers):
            return None
        return self.groups[group].backend.step_pages(self.plans[group])

    def temperatures(self, rule: Temperature) -> Tensor:
        """See CachedAttention; a model has one rule."""
        if self._factors is None:
            if self.locate is None:
                raise InvalidArgument("the forward knows no positions; PagedKVCache.begin makes one that does")
            self._factors = rule.factors(self.locate())
        return self._factors

    def check_complete(self, layers: range | None = None) -> None:
        """InvalidArgument when one of these layers, None: of all, never ran."""
        missing = [layer for layer in layers or self.layers if not self.ran >> layer & 1]
        if missing:
            raise InvalidArgument(f"layers {missing} of the plan never ran; end_forward comes after the last one")

    def _find(self, layer: int) -> tuple[GroupAttention, GroupPlan, int]:
        """A layer's group, what was planned of that, and the layer's index there."""
        if self.standing is not None:
            self.standing.check()
        if layer not in self.layers:
            raise InvalidArgument(f"layer is {layer}; 0 … {len(self.layers) - 1} are accepted")
        group, index = self.layers[layer]
        return self.groups[group], self.plans[group], index


NO_ATTENTION = Attention((), (), {}, None)
"""Of a forward in graph buffers, whose layers the graph computes."""


class Forward(NamedTuple):
    """One forward over B sequences, made by PagedKVCache.begin.

    The caller computes all layers through `attention`, or replays the graph that was captured for `buffers`; then
    commit() ends the forward.
    """

    seq_ids: tuple[int, ...]
    tokens: TokenLayout
    attention: Attention
    sent: Sent | None  # what commit() counts as issued
    standing: Standing | None  # of the sequences, when the forward was planned; None of a step in graph buffers
    buffers: "GraphBuffers | None" = None
    grows: bool = False  # commit() grows the sequences: the forward was foreseen
