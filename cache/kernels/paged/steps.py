"""Triton's kernels for a pool of K and V on a GPU: append, and all of decode and verify steps in graphs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import QKV, DeviceTables, GroupBuffers, GroupPlan, Query, StepPages
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.triton.append import append
from tandem.cache.kernels.triton.decode import decode
from tandem.cache.kernels.triton.decode_plan import DecodePlan, schedule_splits
from tandem.cache.kernels.triton.gather import gather
from tandem.cache.kernels.triton.pushing import AppendPlan
from tandem.cache.kernels.triton.sliding import attend_sliding
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.rope import Rotation


class TritonSteps(AppendThenAttend):
    """A KVBackend without attend(). Its graph buffers are DecodeSteps, or KVBuffers."""

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        super().__init__(pool)
        self._pool = pool
        self.scoring = scoring
        self._fp8 = fp8
        self._dtype = pool.dtype if fp8 is None else fp8.dtype

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: Any
    ) -> tuple[Tensor, Tensor]:
        """k comes back rotated only where own.keep asks for it: attend reads the pages."""
        factors = None if self._fp8 is None else self._fp8.inverse[layer]
        return append(self._pool, layer, q, k, v, rotation, own.targets, keep_k=own.keep, fp8_factors=factors)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        return self._gather(layer, upload([slots], self._pool.device)[0])

    def _gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, num_kv_heads, head_dim] at slots, int32 [n] on the device; entries of 8 bits widened."""
        k, v = gather(self._pool, layer, slots, self._dtype, self._scales(layer)).unbind(1)
        return k, v

    def _scales(self, layer: int) -> Tensor | None:
        return None if self._fp8 is None else self._fp8.scales[layer]

    def _sizes(self, num_q_heads: int) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head_dim, page size."""
        _, _, _, num_kv_heads, page_size, head_dim = self._pool.shape
        return num_q_heads, num_kv_heads, head_dim, page_size


@dataclass(eq=False)
class DecodeSteps(GroupBuffers):
    """Decode and verify steps, in which one kernel computes a layer.

    A graph that a megakernel computes needs no schedule: the forward that ran before the capture shows which one it is.
    """

    kernels: TritonSteps
    own: DecodePlan
    by_layers: bool = True  # False: the last forward gave the pages to a megakernel, and no layer called decode()
    scheduled: bool = False  # whether schedule_splits() was queued for the forward that runs now

    def begin_captured(self, by_layers: bool = False) -> None:
        self.scheduled = by_layers or self.by_layers
        self.by_layers = False  # unless run() or read() is called again
        if self.scheduled:
            schedule_splits(self.own, self.kernels._pool, self.kernels.scoring, self.kernels._fp8)

    def run(self, plan: GroupPlan, layer: int, x: QKV) -> Tensor:
        return self._decode(plan, layer, x, x.k, x.v)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        return self._decode(plan, layer, x, None, None)

    def _decode(self, plan: GroupPlan, layer: int, x: QKV | Query, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert self.scheduled, "begin_captured() has queued no schedule for this step"
        self.by_layers, of = True, self.kernels
        arguments = plan.rotation, self.own, of.scoring, x.sinks, x.norm, of._fp8, x.out
        return decode(of._pool, layer, x.q, k, v, *arguments)

    def step_pages(self, plan: GroupPlan, layers: range) -> StepPages | None:
        of, these = self.kernels, slice(layers.start, layers.stop)
        if of.scoring != Scoring(of.scoring.scale) or plan.rotation is None:
            return None
        scales = None if of._fp8 is None else of._fp8.scales[these]
        return StepPages(of._pool[:, these], self.own.tables, plan.rotation, of.scoring.scale, scales)


@dataclass(frozen=True, eq=False)
class KVBuffers(AppendPlan, GroupBuffers, ABC):
    """Forwards whose layers append and then attend, as AppendThenAttend does."""

    kernels: TritonSteps

    @abstractmethod
    def attend(
        self, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """o of q [T, num_q_heads, head_dim], which is rotated. rotation: of its tokens; they are stored. out: see
        QKV."""

    def run(self, plan: GroupPlan, layer: int, x: QKV) -> Tensor:
        q, k = (x.q, x.k) if x.norm is None else x.norm.apply(x.q, x.k)
        q, _ = self.kernels.append(layer, q, k, x.v, plan.rotation, self)
        return self.attend(layer, q, plan.rotation, x.sinks, x.out)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        q = x.q if x.norm is None else x.norm.apply_to_queries(x.q)
        q = q if plan.rotation is None else plan.rotation.apply(q)
        return self.attend(layer, q, plan.rotation, x.sinks, x.out)


@dataclass(frozen=True, eq=False)
class SlidingSteps(KVBuffers):
    """Decode steps in which sequences may slide."""

    tables: DeviceTables

    def attend(
        self, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        scoring, scales = self.kernels.scoring, self.kernels._scales(layer)
        return attend_sliding(self.kernels._pool, layer, q, self.tables, rotation, scoring, sinks, scales)
