"""The states of a gated delta rule in pages on a CUDA device: eager forwards, and decode steps in graph buffers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import (
    Appended,
    AttentionBackend,
    Capabilities,
    DeviceTables,
    GroupBuffers,
    GroupPlan,
    Limits,
)
from tandem.cache.kernels.delta.chunks import NO_PAGE, ChunkRows, Cuts, advance_states, lay_out_chunks
from tandem.cache.kernels.delta.steps import StepRows, step_states
from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.tables import PageTables, TokenLayout


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """rows: the sequences with one new token; chunks: those with more. None where there are none."""

    rows: StepRows | None
    chunks: ChunkRows | None


class TritonDeltaKernels(AttentionBackend[RecurrentInputs]):
    """See TorchStateKernels. Decode steps have graph buffers, prompts have none."""

    capabilities = Capabilities(trees=False, step_graphs=True, shifts=False)

    def __init__(self, pool: Tensor, shape: DeltaShape) -> None:
        super().__init__(pool)
        self._pool, self._shape = pool, shape

    def clear_pages(self, pages: Int32Array) -> None:
        """Nothing: the first forward of a sequence does not read its page."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> DeltaPlan:
        begins, ends = tokens.qo_indptr[:-1], tokens.qo_indptr[1:]
        pages, behind, single = tables.kv_indices, tables.kv_last_page_len, ends - begins == 1
        others = ~single
        owners, counts, kept = tables.writes
        of_row = single[owners]
        snapshots = np.full(begins.size, NO_PAGE, np.int32)
        snapshots[owners[of_row]] = kept[of_row]
        of_rows = [array[single] for array in (pages, behind, snapshots, begins)]
        places, within = np.cumsum(others) - 1, owners[~of_row]
        cuts = Cuts(places[within], begins[within] + counts[~of_row], kept[~of_row])
        of_chunks = lay_out_chunks(pages[others], behind[others], begins[others], ends[others], cuts)
        uploaded = upload([*of_rows, *of_chunks], self._pool.device)
        return DeltaPlan(
            StepRows(*uploaded[:4]) if single.any() else None, ChunkRows(*uploaded[4:]) if not single.all() else None
        )

    def buffers(self, limits: Limits, tables: DeviceTables) -> "DeltaSteps":
        assert tables.kept is not None, "the tables are of states"
        return DeltaSteps(self, StepRows(tables.slots, tables.kv_last_page_len, tables.kept))

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs, appended: Appended | None = None) -> Tensor:
        own: DeltaPlan = plan.own
        output = self._output(x)
        if own.rows is not None:
            step_states(self._pool, layer, x, self._shape, own.rows, output)
        if own.chunks is not None:
            advance_states(self._pool, layer, x, self._shape, own.chunks, output)
        if appended is not None:
            appended(None, None)
        return output

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Whole entries [n, 1, numbers], twice."""
        (index,) = upload([slots.astype(np.int64)], self._pool.device)
        entries = self._pool[:, layer].index_select(0, index).view(slots.size, 1, -1)
        return entries, entries

    def _output(self, x: RecurrentInputs) -> Tensor:
        shape = x.mixed.shape[0], self._shape.value_heads, self._shape.value_dim
        return torch.empty(shape, dtype=x.mixed.dtype, device=x.mixed.device)


@dataclass(frozen=True, eq=False)
class DeltaSteps(GroupBuffers):
    """Of decode steps: row i has token i. Padding reads and writes no entry."""

    kernels: TritonDeltaKernels
    rows: StepRows

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs) -> Tensor:
        of, output = self.kernels, self.kernels._output(x)
        step_states(of._pool, layer, x, of._shape, self.rows, output)
        return output
