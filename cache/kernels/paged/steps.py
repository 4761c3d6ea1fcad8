"""What Triton's kernels do for a pool of K and V on a GPU: append, and all of decode and verify steps in graphs."""

from typing import Any

from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import QKV, Appended, GroupPlan, Query, StepPages
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.triton.append import append
from tandem.cache.kernels.triton.decode import decode
from tandem.cache.kernels.triton.decode_plan import DecodePlan, schedule_splits
from tandem.cache.kernels.triton.gather import gather
from tandem.cache.kernels.triton.sliding import SlidingSteps, attend_sliding
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.rope import Rotation


class TritonSteps(AppendThenAttend):
    """A KVBackend without attend(). Graph buffers of steps are a DecodePlan, or SlidingSteps where some may slide."""

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        super().__init__(pool)
        self._pool = pool
        self.scoring = scoring
        self._fp8 = fp8
        self._dtype = pool.dtype if fp8 is None else fp8.dtype

    def begin_captured(self, buffers: Any, by_layers: bool = False) -> None:
        if isinstance(buffers, DecodePlan):
            buffers.scheduled = by_layers or buffers.by_layers
            buffers.by_layers = False  # unless run() or read() is called again
            if buffers.scheduled:
                schedule_splits(buffers, self._pool, self.scoring, self._fp8)

    def run(self, plan: GroupPlan, layer: int, x: QKV, appended: Appended | None = None) -> Tensor:
        own = plan.own
        if isinstance(own, SlidingSteps):
            q, k = (x.q, x.k) if x.norm is None else x.norm.apply(x.q, x.k)
            q, _ = self.append(layer, q, k, x.v, plan.rotation, own)
            return self._slide(own, layer, q, plan.rotation, x.sinks)
        if not isinstance(own, DecodePlan):
            return super().run(plan, layer, x, appended)
        assert own.scheduled, "begin_captured() has queued no schedule for this step"
        own.by_layers = True
        return decode(self._pool, layer, x.q, x.k, x.v, plan.rotation, own, self.scoring, x.sinks, x.norm, self._fp8)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        own = plan.own
        if isinstance(own, SlidingSteps):
            q = x.q if x.norm is None else x.norm.apply_to_queries(x.q)
            q = q if plan.rotation is None else plan.rotation.apply(q)
            return self._slide(own, layer, q, plan.rotation, x.sinks)
        if not isinstance(own, DecodePlan):
            return super().read(plan, layer, x)
        assert own.scheduled, "begin_captured() has queued no schedule for this step"
        own.by_layers = True
        return decode(self._pool, layer, x.q, None, None, plan.rotation, own, self.scoring, x.sinks, x.norm, self._fp8)

    def step_pages(self, plan: GroupPlan, layers: range) -> StepPages | None:
        plain = self.scoring == Scoring(self.scoring.scale)
        if not plain or plan.rotation is None or not isinstance(plan.own, DecodePlan):
            return None
        pool, scales = self._pool[:, layers.start : layers.stop], None if self._fp8 is None else self._fp8.scales
        scales = scales if scales is None else scales[layers.start : layers.stop]
        return StepPages(pool, plan.own.tables, plan.rotation, self.scoring.scale, scales)

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

    def _slide(
        self, own: SlidingSteps, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None
    ) -> Tensor:
        return attend_sliding(self._pool, layer, q, own.tables, rotation, self.scoring, sinks, self._scales(layer))

    def _scales(self, layer: int) -> Tensor | None:
        return None if self._fp8 is None else self._fp8.scales[layer]

    def _sizes(self, num_q_heads: int) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head_dim, page size."""
        _, _, _, num_kv_heads, page_size, head_dim = self._pool.shape
        return num_q_heads, num_kv_heads, head_dim, page_size
