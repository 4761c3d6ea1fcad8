"""Torch kernels: the CPU serving path, and the reference that other backends are compared with."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import Capabilities, Part
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.attention import (
    AttentionPart,
    StoredParts,
    plan_attention,
    plan_prompts,
    plan_stored,
)
from tandem.cache.kernels.torch.sharing import plan_shared, sharing_rule
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kv_scales import FP8
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout


@dataclass(frozen=True, eq=False)
class TorchPlan:
    """append_rows: int64 [T · num_kv_heads], the rows of head_dim elements, of layer 0's K, that new tokens fill."""

    append_rows: Tensor
    parts: tuple[AttentionPart, ...]


class TorchKernels(AppendThenAttend):
    """See KVBackend. plan() makes row ids of layer 0's K.

    Every layer reads and writes the pool through a view that begins where that layer's K or V does, so one set of ids
    serves all layers:

        pool, rows of head_dim:   | page 0: layer 0 K, V | layer 1 K, V | … | page 1: layer 0 K, V | …
        view of layer 1's V:                               └─ row 0
    """

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        super().__init__(pool)
        _, layers, _, heads, page_size, head_dim = pool.shape
        self._fp8 = fp8
        self._dtype = pool.dtype if fp8 is None else fp8.dtype
        spans = pool.view(-1, page_size * head_dim)
        self._pool = pool
        self.scoring = scoring
        self.capabilities = Capabilities(sharing=sharing_rule(pool, scoring.window), reads=True)
        self._page_size = page_size
        self._heads = heads
        self._page_rows = layers * 2 * heads  # of page_size · head_dim elements
        self._head_offsets = np.arange(heads) * page_size
        rows = self._words.view(-1, head_dim)
        value = heads * page_size
        self._key_rows = [rows[2 * value * layer :] for layer in range(layers)]
        self._value_rows = [rows[2 * value * layer + value :] for layer in range(layers)]
        self._spans = [spans[2 * heads * layer :] for layer in range(layers)]

    def plan(self, tokens: TokenLayout, tables: PageTables) -> TorchPlan:
        slots, window = tables.slot_mapping.astype(np.int64), self.scoring.window
        rows = slots + slots // self._page_size * ((self._page_rows - 1) * self._page_size)
        append_rows = torch.from_numpy((rows[:, None] + self._head_offsets).reshape(-1)).to(self._pool.device)
        if tables.shared is None:
            return TorchPlan(append_rows, plan_attention(tokens, tables, self._pool, window, self._dtype))
        decodes = plan_shared(tokens, tables, self._pool, self._dtype)
        return TorchPlan(append_rows, (decodes, *plan_prompts(tokens, tables, self._pool, window, self._dtype)))

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: TorchPlan
    ) -> tuple[Tensor, Tensor]:
        if rotation is not None:
            q, k = rotation.apply_both(q, k)
        size, keys, values = k.shape[-1], k, v
        if self._fp8 is not None:
            keys, values = (entries.view(torch.uint8) for entries in self._fp8.quantise(layer, k, v))
        self._key_rows[layer].index_copy_(0, own.append_rows, keys.reshape(-1, size))
        self._value_rows[layer].index_copy_(0, own.append_rows, values.reshape(-1, size))
        return q, k

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: TorchPlan, sinks: Tensor | None = None
    ) -> Tensor:
        if self._fp8 is None:
            return self._attend_parts(layer, q, k, v, own, sinks)
        # Entries take part as they are: their scales are q's and the output's.
        if k is not None and v is not None:
            k, v = (entries.to(q.dtype) for entries in self._fp8.quantise(layer, k, v))
        output = self._attend_parts(layer, self._fp8.scale_queries(layer, q), k, v, own, sinks)
        return self._fp8.scale_output(layer, output)

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> StoredParts:
        return plan_stored(tokens, tables, self._pool, self.scoring.window, self._dtype, causal=causal)

    def read_part(self, own: StoredParts, layer: int, q: Tensor) -> Part:
        queries = q if self._fp8 is None else self._fp8.scale_queries(layer, q)
        output = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in own:
            of_part = part.attend_in_part(self._spans[layer], part.take(queries), self.scoring)
            output[part.tokens], lse[part.tokens] = of_part
        output = output.to(q.dtype)
        return Part(output if self._fp8 is None else self._fp8.scale_output(layer, output), lse)

    def _attend_parts(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, plan: TorchPlan, sinks: Tensor | None
    ) -> Tensor:
        if len(plan.parts) == 1:
            return self.attend_part(layer, plan.parts[0], q, k, v, sinks)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in plan.parts:
            output[part.tokens] = self.attend_part(layer, part, part.take(q), k, v, sinks)
        return output

    def attend_part(
        self, layer: int, part: AttentionPart, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """o of the part's tokens from their q and all of k and v; None: these are in the pages alone."""
        return part.attend(self._spans[layer], q, k, v, self.scoring, sinks)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        pages, offsets = upload(list(np.divmod(slots.astype(np.int64), self._page_size)), self._words.device)
        k, v = self._words[pages, layer, :, :, offsets].unbind(1)
        if self._fp8 is None:
            return k, v
        return self._fp8.dequantise(layer, k.view(FP8), v.view(FP8))
