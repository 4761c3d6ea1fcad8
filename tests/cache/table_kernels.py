"""Torch kernels that can be captured in a graph, for machines without a GPU: they read tables where they stand."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.head_norm import HeadNorm
from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.torch_kernels import TorchKernels, TorchPlan
from tandem.cache.plan import PageTables, lay_out_tokens
from tandem.cache.rope import Rotation


class TableKernels(TorchKernels):
    """GraphKernels. What a padding row attends to is NaN, so that nobody can have used it."""

    def fixed_plan(self, tables: DeviceTables, num_q_heads: int) -> DeviceTables:
        return tables

    def step(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None,
        plan: DeviceTables,
        sinks: Tensor | None,
        norm: HeadNorm | None,
    ) -> Tensor:
        output = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        rows = np.flatnonzero(plan.slots.numpy() >= 0)
        if rows.size:
            if norm is not None:
                q, k = norm.apply(q, k)
            if rotation is not None:
                q, k = rotation.apply_both(q, k)
            stored = self._stored(rows, plan)
            super().append(layer, q[rows], k[rows], v[rows], None, stored)
            output[rows] = super().attend(layer, q[rows], k[rows], v[rows], stored, sinks)
        return output

    def _stored(self, rows: NDArray[np.int64], tables: DeviceTables) -> TorchPlan:
        """The plan of `rows` alone, those that are no padding."""
        slots, indptr = tables.slots.numpy(), tables.kv_indptr.numpy()
        last, indices = tables.kv_last_page_len.numpy(), tables.kv_indices.numpy()
        assert rows.tolist() == list(range(rows.size))  # padding comes last
        lengths = (np.diff(indptr)[rows] - 1) * self._page_size + last[rows]
        end = int(indptr[rows.size])
        own = PageTables(
            slots[rows].copy(),
            indptr[: rows.size + 1].copy(),
            indices[:end].copy(),
            last[rows].copy(),
            lengths.astype(np.int32),
        )
        tokens = lay_out_tokens(lengths.astype(np.int64) - 1, np.ones(rows.size, np.int64))
        return self.plan(tokens, own)
