"""What backends of one kind of entries do alike: the order of a layer's work, and that of backends without graphs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.base import (
    QKV,
    Appended,
    Capabilities,
    DeviceTables,
    GroupPlan,
    Latents,
    Limits,
    PeerPool,
    StepPages,
)
from tandem.cache.kernels.page_memory import PageMemory
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.tables import PageTables, Send, TokenLayout


class PoolBackend(PageMemory):
    """An AttentionBackend without graphs and without stores into peers."""

    capabilities = Capabilities()

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        return 0

    def buffers(self, limits: Limits, tables: DeviceTables) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no graph buffers")

    def begin_captured(self, buffers: Any) -> None:
        """Nothing is computed for all layers together."""

    def takes_shared(self, buffers: Any, shared: SharedPrefixes) -> bool:
        return False

    def push_with_append(self, own: Any, sends: Sequence[Send], peer_pool: PeerPool) -> tuple[Any, tuple[Send, ...]]:
        return own, tuple(sends)

    def step_pages(self, plan: GroupPlan) -> StepPages | None:
        return None


class AppendThenAttend(PoolBackend, ABC):
    """A KVBackend of two kernels a layer, which `own`, a plan of plan(), tells what to do."""

    scoring: Scoring

    @abstractmethod
    def plan(self, tokens: TokenLayout, tables: PageTables, buffers: Any = None) -> Any:
        """See AttentionBackend."""

    @abstractmethod
    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k rotated; the latter and v go into the new tokens' slots.

        q, k and v are left as they are. Without rotation q and k may be what is returned.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, own: Any, sinks: Tensor | None = None) -> Tensor:
        """q and k are what append() returned just before, v is what it was given."""

    @abstractmethod
    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """See PageOperations."""

    def run(self, plan: GroupPlan, layer: int, x: QKV, appended: Appended | None = None) -> Tensor:
        q, k, v, sinks, norm = x
        if norm is not None:
            q, k = norm.apply(q, k)
        q, k = self.append(layer, q, k, v, plan.rotation, plan.own)
        if appended is not None:
            appended(k, v)
        sliding = plan.sliding
        if sliding is None:
            return self.attend(layer, q, k, v, plan.own, sinks)
        if sliding.num_tokens == q.shape[0]:
            output = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:  # what the kernels make of tokens of sequences that slide is replaced
            output = self.attend(layer, q, k, v, plan.own, sinks)
        return sliding.attend(output, q, partial(self.read_slots, layer), self.scoring, sinks)


class LatentAppendThenAttend(PoolBackend, ABC):
    """A LatentBackend of two kernels a layer."""

    @abstractmethod
    def append(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates the last numbers of q and keys; latents and keys go into the new tokens' slots.

        Any may be overwritten. Returns q and the entries [T, 1, rank + rotated]; None where no writer takes them.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, own: Any, up: UpProjections) -> Tensor:
        """o [T, num_heads, value_dim]."""

    def run(self, plan: GroupPlan, layer: int, x: Latents, appended: Appended | None = None) -> Tensor:
        q, entries = self.append(layer, x.q, x.latents, x.keys, plan.rotation, plan.own)
        if appended is not None:
            appended(entries, None)
        return self.attend(layer, q, plan.own, x.up)
