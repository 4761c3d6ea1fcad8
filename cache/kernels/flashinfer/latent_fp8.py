"""Kernels of a pool of latents of 8 bits on a CUDA device: FlashInfer attends to expanded ones, Triton to others."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Capabilities, DeviceTables, GroupBuffers, GroupPlan, Latents, Limits
from tandem.cache.kernels.flashinfer.eager import EagerPlan
from tandem.cache.kernels.flashinfer.latent import ChosenBuffers, FlashInferLatentKernels
from tandem.cache.kernels.flashinfer.parts import ChosenTokens, SeenTokens, plan_parts
from tandem.cache.kernels.gpu_limits import RANK, ROTATED
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.chosen import attend_seen
from tandem.cache.kernels.triton.index_scores import SeenPages
from tandem.cache.kernels.triton.pushing import AppendPlan
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.latent import UpProjections, absorbed_is_cheaper
from tandem.cache.plan.tables import PageTables, TokenLayout


class Fp8LatentKernels(FlashInferLatentKernels):
    """See LatentBackend; takes no token trees. Each token reads its entries for itself: new tokens of one sequence do
    not share what they read, but through the GPU's cache."""

    def _prepare_absorbed(self) -> None:
        self.capabilities = Capabilities(trees=False, pushes=True, step_graphs=True, verify_graphs=True)

    def plan(self, tokens: TokenLayout, tables: PageTables) -> EagerPlan:
        absorbed = absorbed_is_cheaper(np.diff(tokens.qo_indptr), tables.kv_lens, RANK, ROTATED, self._heads)
        choosers, device = Choosers.of(tokens, tables, self._top_k), self._pool.device
        gathered = ~(absorbed | choosers.sequences)
        rows = np.flatnonzero((absorbed & ~choosers.sequences)[tokens.owners])
        slots, parts = plan_parts(
            *(tokens, tables, [(gathered, True)], self._pool.shape[4], device),
            others=bool(rows.size or choosers.tokens.size),
        )
        seen = None
        if rows.size:
            lengths, firsts = tokens.positions[rows] + np.int32(1), tables.kv_indptr[tokens.owners[rows]]
            its, *pages = upload([rows, lengths, firsts, tables.kv_indices], device)
            seen = SeenTokens(its, SeenPages(*pages), int(lengths.max()))
        chosen = ChosenTokens.of(choosers, tables.kv_indices, device)
        return EagerPlan(AppendTargets(slots, None), parts, chosen, seen)

    def buffers(self, limits: Limits, tables: DeviceTables) -> GroupBuffers:
        if self._top_k is not None:
            return ChosenBuffers(AppendTargets(tables.slots, None), self, tables)
        longest = tables.kv_indices.shape[0] // limits.num_tokens * self._pool.shape[4]
        seen = SeenPages(torch.ones_like(tables.kv_last_page_len), tables.kv_indptr[:-1], tables.kv_indices)
        return SeenBuffers(AppendTargets(tables.slots, None), self, tables, seen, longest)

    def attend(self, layer: int, q: Tensor, own: EagerPlan, up: UpProjections, chosen: Tensor | None = None) -> Tensor:
        output = super().attend(layer, q, own, up, chosen)
        if own.seen is not None:
            its = q.index_select(0, own.seen.tokens)
            output.index_copy_(0, own.seen.tokens, self.attend_seen(layer, its, up, own.seen.pages, own.seen.longest))
        return output

    def attend_seen(self, layer: int, q: Tensor, up: UpProjections, seen: SeenPages, longest: int) -> Tensor:
        """o [n, num_heads, value_dim] of q [n, num_heads, key_dim + rotated] over what each token sees."""
        still, rotated = self._split(q)
        return up.values(
            attend_seen(self._pool, layer, up.absorb(still), rotated, seen, longest, self.scale, self._fp8)
        )


@dataclass(frozen=True, eq=False)
class SeenBuffers(AppendPlan, GroupBuffers):
    """A decode step in a CUDA graph. longest: of what a token may see."""

    kernels: Fp8LatentKernels
    tables: DeviceTables
    seen: SeenPages
    longest: int

    def begin_captured(self, by_layers: bool = False) -> None:
        """Queues the computation of the rows' lengths."""
        full = (self.tables.kv_indptr[1:] - self.tables.kv_indptr[:-1] - 1) * self.kernels._pool.shape[4]
        torch.add(full, self.tables.kv_last_page_len, out=self.seen.lengths)

    def run(self, plan: GroupPlan, layer: int, x: Latents) -> Tensor:
        q, _ = self.kernels.append(layer, x.q, x.latents, x.keys, plan.rotation, self)
        return self.kernels.attend_seen(layer, q, x.up, self.seen, self.longest)
