"""Recurrent states in pages on a CUDA device: eager forwards, and decode and verify steps in graph buffers."""

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
from tandem.cache.kernels.delta.chunk_rows import NO_PAGE, ChunkRows, Cuts, lay_out_chunks
from tandem.cache.kernels.delta.chunks import advance_states
from tandem.cache.kernels.delta.runs import RunRows, Runs, again_rows
from tandem.cache.kernels.delta.steps import StepRows, step_states
from tandem.cache.kernels.recurrent import RecurrentInputs, StateShape
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.tables import PageTables, TokenLayout


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """rows: sequences with one new token, None without any. chunks: sequences with more, None without any. runs: all
    sequences of a forward with drafts."""

    rows: StepRows | None
    chunks: ChunkRows | None
    runs: Runs | None = None


class TritonDeltaKernels(AttentionBackend[RecurrentInputs]):
    """See TorchStateKernels. Decode and verify steps have graph buffers, prompts have none."""

    capabilities = Capabilities(trees=False, step_graphs=True, verify_graphs=True, shifts=False)

    def __init__(self, pool: Tensor, shape: StateShape) -> None:
        super().__init__(pool)
        self._pool, self._shape = pool, shape
        self._drafted: Runs | None = None  # of the last forward with drafts

    def clear_pages(self, pages: Int32Array) -> None:
        """Does nothing: the first forward of a sequence does not read its page."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> DeltaPlan:
        if tables.drafted:
            self._drafted = self._plan_runs(tokens, tables)
            return DeltaPlan(None, None, self._drafted)
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

    def _plan_runs(self, tokens: TokenLayout, tables: PageTables) -> Runs:
        apart, writes, of_each = tokens.apart(), tables.writes.apart(tokens), tokens.owners
        kept = np.full(of_each.size, NO_PAGE, np.int32)
        kept[writes.sequences] = writes.pages
        assert apart.preceding is not None
        arrays = [tables.kv_indices[of_each], tables.kv_last_page_len[of_each], kept, apart.preceding]
        return Runs(RunRows(*upload(arrays, self._pool.device)), tokens.qo_indptr[:-1].astype(np.int64))

    def buffers(self, limits: Limits, tables: DeviceTables) -> "DeltaSteps | DeltaRuns":
        assert tables.kept is not None, "the tables are of states"
        if tables.preceding is not None:
            rows = RunRows(tables.slots, tables.kv_last_page_len, tables.kept, tables.preceding)
            return DeltaRuns(self, Runs(rows, np.empty(0, np.int64)))
        return DeltaSteps(self, StepRows(tables.slots, tables.kv_last_page_len, tables.kept))

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs, appended: Appended | None = None) -> Tensor:
        own: DeltaPlan = plan.own
        output = self._output(x)
        if own.runs is not None:
            own.runs.run(self._pool, layer, x, self._shape, output)
        if own.rows is not None:
            step_states(self._pool, layer, x, self._shape, own.rows, output)
        if own.chunks is not None:
            advance_states(self._pool, layer, x, self._shape, own.chunks, output)
        if appended is not None:
            appended(None, None)
        return output

    @torch.inference_mode()
    def compute_again(self, sequence: int, count: int, source: int, target: int) -> None:
        """See PageOperations. One launch for all layers."""
        assert self._drafted is not None, "a forward with drafts comes first"
        self.copy_pages(np.array([source], np.int32), np.array([target], np.int32))
        rows = RunRows(*upload(again_rows(target, count), self._pool.device))
        self._drafted.run_again(self._pool, sequence, count, self._shape, rows)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Whole entries [n, 1, numbers], twice."""
        (index,) = upload([slots.astype(np.int64)], self._pool.device)
        entries = self._pool[:, layer].index_select(0, index).view(slots.size, 1, -1)
        return entries, entries

    def _output(self, x: RecurrentInputs) -> Tensor:
        shape = x.mixed.shape[0], self._shape.heads, self._shape.output_dim
        return torch.empty(shape, dtype=x.mixed.dtype, device=x.mixed.device)


@dataclass(frozen=True, eq=False)
class DeltaSteps(GroupBuffers):
    """Graph buffers of decode steps. Row i has token i. Padding reads and writes no entry."""

    kernels: TritonDeltaKernels
    rows: StepRows

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs) -> Tensor:
        of, output = self.kernels, self.kernels._output(x)
        step_states(of._pool, layer, x, of._shape, self.rows, output)
        return output


@dataclass(frozen=True, eq=False)
class DeltaRuns(GroupBuffers):
    """Graph buffers of verify steps. Row i has token i. A step's inputs stay here until the next step."""

    kernels: TritonDeltaKernels
    runs: Runs

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        assert tokens.preceding is not None, "rows of a verify step stand apart"
        self.runs.begins = (tokens.preceding == 0).nonzero()[0]
        self.kernels._drafted = self.runs

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs) -> Tensor:
        of, output = self.kernels, self.kernels._output(x)
        self.runs.run(of._pool, layer, x, of._shape, output)
        return output
