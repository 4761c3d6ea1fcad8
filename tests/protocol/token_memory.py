"""Kernels that store token ids where K and V would be, and compare what a token attends to with what belongs there."""

from typing import Any

import numpy as np
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenAttend
from tandem.cache.kernels.base import Capabilities
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.tables import PageTables, TokenLayout

LABELS = 100  # token id = LABELS · request's label + position
POISON = -1


class TokenMemory(AppendThenAttend):
    """The pages of one PE, page_size 1. Wrong KV is noted in `findings`, for a loop would survive an exception."""

    capabilities = Capabilities(trees=False)

    def __init__(self, name: str, num_pages: int, findings: list[str]) -> None:
        self.tokens = np.full(num_pages, POISON, np.int64)
        self._name = name
        self._findings = findings

    def bound(self, pool: Tensor, scoring: Scoring, fp8: Any = None) -> "TokenMemory":
        """A KernelFactory."""
        return self

    def plan(self, tokens: TokenLayout, tables: PageTables) -> PageTables:
        return tables

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Any, own: PageTables
    ) -> tuple[Tensor, Tensor]:
        self.tokens[own.slot_mapping] = k[:, 0, 0].numpy()
        return q, k

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: PageTables, sinks: Tensor | None = None
    ) -> Tensor:
        for begin, end in zip(own.kv_indptr, own.kv_indptr[1:], strict=False):
            held = self.tokens[own.kv_indices[begin:end]]
            label = held[-1] // LABELS  # of the token just appended
            if not np.array_equal(held, label * LABELS + np.arange(held.size)):
                self._findings.append(f"wrong KV: {self._name} attends to {held.tolist()}")
        return q

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        self.tokens[targets] = self.tokens[sources]

    def clear_pages(self, pages: Int32Array) -> None:
        self.tokens[pages] = POISON

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("nothing of the protocol reads slots")
