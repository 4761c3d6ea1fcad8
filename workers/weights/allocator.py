"""Memory for what a checkpoint fills."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.weights.dense import Dense, DenseStack
from tandem.workers.weights.weight import Weight, WeightStack


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised tensors and weights. A format that memory keeps overrides linear() and stack()."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def when(self, wanted: bool, *shape: int) -> Tensor | None:
        return self(*shape) if wanted else None

    def dense(self, rows: int, columns: int, *, biased: bool = False) -> Weight:
        """For embeddings, heads and routers, which no checkpoint quantizes."""
        return Dense(self(rows, columns), self.when(biased, rows))

    def linear(self, rows: int, columns: int, *, biased: bool = False) -> Weight:
        return self.dense(rows, columns, biased=biased)

    def stack(
        self, count: int, rows: int, columns: int, *, biased: bool = False, transposed: bool = False
    ) -> WeightStack:
        """transposed: the checkpoint has [count, columns, rows]."""
        weight = self(count, columns, rows).transpose(1, 2) if transposed else self(count, rows, columns)
        return DenseStack(weight, self.when(biased, count, rows))
