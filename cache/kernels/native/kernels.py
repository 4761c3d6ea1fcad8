"""Kernels of native.c for float32 on a CPU; what they do not do, torch's do."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import Capabilities, Part
from tandem.cache.kernels.native.crew import Crew
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.attention import AttentionPart, StoredParts, plan_prompts
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout

SOURCE = Path(__file__).with_name("native.c")
LANES, MAX_HEAD_DIM = 8, 256  # as in native.c
NO_WINDOW = 2**31 - 1
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Pool(ctypes.Structure):
    """Pool of native.c."""

    _fields_ = (
        *(("pages", POINTER), ("page_stride", INT64), ("layer_stride", INT64), ("value_offset", INT64)),
        *((name, INT32) for name in ("num_kv_heads", "page_size", "head_dim", "window")),
        *(("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
    )


class _Step(ctypes.Structure):
    """Step of native.c."""

    _fields_ = (
        *((name, POINTER) for name in ("slots", "page_ids", "tokens", "first_page", "lengths", "crew")),
        *((name, INT32) for name in ("num_tokens", "num_decodes")),
    )


@dataclass(frozen=True, eq=False)
class NativePlan:
    """step points into page_ids and indices, which the plan keeps alive. address: of step. parts: for torch."""

    num_decodes: int
    parts: tuple[AttentionPart, ...]
    address: int
    step: _Step
    page_ids: Int32Array
    indices: Int32Array


class NativeKernels(AppendThenAttend):
    """See KVBackend. The pool is float32, on the CPU, contiguous.

    Sequences with one new token attend natively, by the threads of `crew`; prompts by torch's parts.
    """

    def __init__(self, pool: Tensor, scoring: Scoring, library: ctypes.CDLL, crew: Crew) -> None:
        super().__init__(pool)
        _, layers, _, self._heads, page_size, self._head_dim = pool.shape
        tiles = self._heads * page_size * self._head_dim
        self._torch = TorchKernels(pool, scoring)
        self.scoring = scoring
        self.capabilities = Capabilities(reads=True)
        self._tensor = pool
        self._crew = crew
        sizes = (self._heads, page_size, self._head_dim, scoring.window or NO_WINDOW)
        self._pool = _Pool(
            pool.data_ptr(), 2 * layers * tiles, 2 * tiles, tiles, *sizes, scoring.scale, scoring.softcap or 0.0
        )
        self._pool_address = ctypes.addressof(self._pool)
        q, k, v, factors = (POINTER, INT64, INT32), (POINTER, INT64), (POINTER, INT64), (POINTER, POINTER, INT32)
        self._append = library.append
        self._append.argtypes = (POINTER, POINTER, INT32, *q, *k, *v, *factors, POINTER, POINTER)
        self._append.restype = None
        self._attend = library.decode_attention
        self._attend.argtypes = (POINTER, POINTER, INT32, *q, POINTER, POINTER)
        self._attend.restype = None

    @staticmethod
    def takes_head_dim(head_dim: int) -> bool:
        return head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM

    def plan(self, tokens: TokenLayout, tables: PageTables) -> NativePlan:
        queries, first_pages, lengths = tokens.qo_indptr[:-1], tables.kv_indptr[:-1], tables.kv_lens
        parts: tuple[AttentionPart, ...] = ()
        if tokens.positions.size != queries.size or tokens.trees is not None:
            single = tokens.single
            queries, first_pages, lengths = queries[single], first_pages[single], lengths[single]
            parts = plan_prompts(tokens, tables, self._tensor, self.scoring.window, self._tensor.dtype)
        page_ids, num_tokens, num_decodes = tables.kv_indices, tables.slot_mapping.size, queries.size
        indices = np.concatenate((tables.slot_mapping, queries, first_pages, lengths), dtype=np.int32)
        slots = _address(indices)
        first_query = slots + 4 * num_tokens
        of_decodes = first_query, first_query + 4 * num_decodes, first_query + 8 * num_decodes
        step = _Step(slots, _address(page_ids), *of_decodes, self._crew.address, num_tokens, num_decodes)
        return NativePlan(num_decodes, parts, ctypes.addressof(step), step, page_ids, indices)

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, own: NativePlan
    ) -> tuple[Tensor, Tensor]:
        num_q_heads = q.shape[1]
        q, k, v = self._rows(q), self._rows(k), self._rows(v)
        rotated_q, rotated_k, factors = q, k, (0, 0, 0)
        if rotation is not None:
            table, rows = rotation.table, rotation.rows
            factors = (table.data_ptr(), 0 if rows is None else rows.data_ptr(), table.shape[2])
            rotated_q = torch.empty_like(q, memory_format=torch.contiguous_format)
            rotated_k = torch.empty_like(k, memory_format=torch.contiguous_format)
        self._append(
            *(self._pool_address, own.address, layer),
            *(q.data_ptr(), q.stride(0), num_q_heads),
            *(k.data_ptr(), k.stride(0)),
            *(v.data_ptr(), v.stride(0)),
            *factors,
            *(rotated_q.data_ptr(), rotated_k.data_ptr()),
        )
        return rotated_q, rotated_k

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: NativePlan, sinks: Tensor | None = None
    ) -> Tensor:
        num_q_heads = q.shape[1]
        if not own.num_decodes and len(own.parts) == 1:
            return self._torch.attend_part(layer, own.parts[0], q, k, v, sinks)
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        if own.num_decodes:
            q = self._rows(q)
            logits = None if sinks is None else sinks.float().contiguous()
            self._attend(
                *(self._pool_address, own.address, layer),
                *(q.data_ptr(), q.stride(0), num_q_heads),
                *(None if logits is None else logits.data_ptr(), output.data_ptr()),
            )
        for part in own.parts:
            output[part.tokens] = self._torch.attend_part(layer, part, part.take(q), k, v, sinks)
        return output

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> StoredParts:
        return self._torch.plan_read(tokens, tables, causal=causal)

    def read_part(self, own: StoredParts, layer: int, q: Tensor) -> Part:
        return self._torch.read_part(own, layer, q)

    def clear_pages(self, pages: Int32Array) -> None:
        """Nothing to do: neither native.c nor the parts of prompts read past the end of a sequence."""

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        return self._torch.read_slots(layer, slots)

    def _rows(self, x: Tensor) -> Tensor:
        """x as native.c takes it: the heads of a token side by side."""
        return x if x.stride()[1:] == (self._head_dim, 1) else x.contiguous()


def _address(array: Int32Array) -> int:
    """Returns the address of a writable array that is not empty, in a third of the time that array.ctypes takes."""
    return ctypes.addressof(INT32.from_buffer(array.data))
