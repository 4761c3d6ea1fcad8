"""The order of a layer's work, for the backends of one kind of entries."""

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.base import QKV, Appended, AttentionBackend, GroupPlan, Index, Latents, Query
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation


class AppendThenAttend(AttentionBackend[QKV]):
    """A KVBackend of two kernels a layer. own: what plan() returned."""

    scoring: Scoring

    @abstractmethod
    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k rotated; the latter and v go into the new tokens' slots.

        q, k and v are left as they are. Without rotation q and k may be what is returned.
        """

    @abstractmethod
    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: Any, sinks: Tensor | None = None
    ) -> Tensor:
        """q and k are what append() returned just before, v is what it was given; k and v None: both were stored
        before."""

    def run(self, plan: GroupPlan, layer: int, x: QKV, appended: Appended | None = None) -> Tensor:
        q, k, v, sinks, norm, _ = x
        if norm is not None:
            q, k = norm.apply(q, k)
        q, k = self.append(layer, q, k, v, plan.rotation, plan.own)
        if appended is not None:
            appended(k, v)
        return self._attend_any(plan, layer, q, k, v, sinks)

    def store_kv(self, plan: GroupPlan, layer: int, k: Tensor, v: Tensor, appended: Appended | None = None) -> None:
        k = self.append(layer, k, k, v, None, plan.own)[1]
        if appended is not None:
            appended(k, v)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        q = x.q if x.norm is None else x.norm.apply_to_queries(x.q)
        if plan.rotation is not None:
            q = plan.rotation.apply(q)
        return self._attend_any(plan, layer, q, None, None, x.sinks)

    def _attend_any(
        self, plan: GroupPlan, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """Attends like attend(), also for sequences that slide."""
        sliding = plan.sliding
        if sliding is None:
            return self.attend(layer, q, k, v, plan.own, sinks)
        if sliding.num_tokens == q.shape[0]:
            output = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:  # what the kernels make of tokens of sequences that slide is replaced
            output = self.attend(layer, q, k, v, plan.own, sinks)
        return sliding.attend(output, q, partial(self.read_slots, layer), self.scoring, sinks)


class LatentAppendThenAttend(AttentionBackend[Latents]):
    """A LatentBackend of two kernels a layer. own: what plan() returned. scale: of the softmax."""

    scale: float

    @abstractmethod
    def append(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates the last numbers of q and keys; latents and keys go into the new tokens' slots.

        Any may be overwritten. Returns q and the entries [T, 1, rank + rotated]; None where no writer takes them.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, own: Any, up: UpProjections, chosen: Tensor | None = None) -> Tensor:
        """o [T, num_heads, value_dim]. chosen: see Latents."""

    def run(self, plan: GroupPlan, layer: int, x: Latents, appended: Appended | None = None) -> Tensor:
        q, entries = self.append(layer, x.q, x.latents, x.keys, plan.rotation, plan.own)
        if appended is not None:
            appended(entries, None)
        sliding = plan.sliding
        if sliding is None:
            return self.attend(layer, q, plan.own, x.up, x.chosen)
        if sliding.num_tokens == q.shape[0]:
            output = q.new_empty((*q.shape[:2], x.up.heads.value_dim))
        else:  # what the kernels make of tokens of sequences that slide is replaced
            output = self.attend(layer, q, plan.own, x.up, x.chosen)
        return sliding.attend_latents(output, q, partial(self.read_slots, layer), self.scale, x.up)


class AppendThenChoose(AttentionBackend[Index]):
    """An IndexBackend of two steps a layer. own: what plan() returned."""

    @abstractmethod
    def append(
        self, layer: int, q: Tensor, still: Tensor, rotated: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Does what LatentAppendThenAttend.append does, for index keys in two parts."""

    @abstractmethod
    def choose(self, layer: int, q: Tensor, weights: Tensor, own: Any) -> Tensor:
        """int32 [n, top_k]: what the n choosers attend to, see Latents."""

    def run(self, plan: GroupPlan, layer: int, x: Index, appended: Appended | None = None) -> Tensor:
        q, entries = self.append(layer, x.q, x.still, x.rotated, plan.rotation, plan.own)
        if appended is not None:
            appended(entries, None)
        return self.choose(layer, q, x.weights, plan.own)
