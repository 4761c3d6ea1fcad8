"""Memory for what a checkpoint fills."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.workers.weights.dense import Dense, DenseStack
from tandem.workers.weights.weight import Weight, WeightStack


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised tensors and weights of one dtype and device."""

    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def when(self, wanted: bool, *shape: int) -> Tensor | None:
        return self(*shape) if wanted else None

    def dense(self, rows: int, columns: int, *, biased: bool = False) -> Weight:
        return Dense(self(rows, columns), self.when(biased, rows))

    def stack(
        self, count: int, rows: int, columns: int, *, biased: bool = False, transposed: bool = False
    ) -> WeightStack:
        """transposed: memory holds [count, columns, rows]."""
        weight = self(count, columns, rows).transpose(1, 2) if transposed else self(count, rows, columns)
        return DenseStack(weight, self.when(biased, count, rows))
