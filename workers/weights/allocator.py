"""Memory for what a checkpoint fills."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.weights.dense import Dense, DenseStack
from tandem.workers.weights.weight import Weight, WeightStack


class Form(Protocol):
    """How memory holds a weight: a frozen value, chosen by what a checkpoint stores."""

    def weight(self, new: "Allocator", rows: int, columns: int, bias: Tensor | None) -> Weight: ...

    def stack(
        self, new: "Allocator", count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> WeightStack:
        """transposed: the checkpoint has [count, columns, rows]."""
        ...


class DenseForm(Form):
    """Weights in the dtype that the model computes in."""

    def weight(self, new: "Allocator", rows: int, columns: int, bias: Tensor | None) -> Dense:
        return Dense(new(rows, columns), bias)

    def stack(
        self, new: "Allocator", count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> DenseStack:
        weight = new(count, columns, rows).transpose(1, 2) if transposed else new(count, rows, columns)
        return DenseStack(weight, bias)


DENSE: Form = DenseForm()
Forms = Iterator[Form]
"""A form for each call of linear() and stack(), in the order of the calls."""

ALL_DENSE: Forms = repeat(DENSE)


@dataclass(frozen=True)
class Allocator:
    """Makes uninitialised tensors and weights."""

    dtype: torch.dtype
    device: torch.device
    forms: Forms = ALL_DENSE

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def when(self, wanted: bool, *shape: int) -> Tensor | None:
        return self(*shape) if wanted else None

    def dense(self, rows: int, columns: int, *, biased: bool = False) -> Weight:
        """Makes a weight for embeddings, heads and routers, which layers also look up or compute in another dtype."""
        return DENSE.weight(self, rows, columns, self.when(biased, rows))

    def linear(self, rows: int, columns: int, *, biased: bool = False) -> Weight:
        return next(self.forms).weight(self, rows, columns, self.when(biased, rows))

    def stack(
        self, count: int, rows: int, columns: int, *, biased: bool = False, transposed: bool = False
    ) -> WeightStack:
        """transposed: see Form.stack."""
        bias = self.when(biased, count, rows)
        return next(self.forms).stack(self, count, rows, columns, bias, transposed=transposed)


class Sketch(DenseForm):
    """The form of all weights of a model that is allocated on the meta device, to see which tensors fill which."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []

    def weight(self, new: Allocator, rows: int, columns: int, bias: Tensor | None) -> Dense:
        made = super().weight(new, rows, columns, bias)
        self._made.append(made.weight)
        return made

    def stack(
        self, new: Allocator, count: int, rows: int, columns: int, bias: Tensor | None, *, transposed: bool
    ) -> DenseStack:
        made = super().stack(new, count, rows, columns, bias, transposed=transposed)
        self._made.append(made.weight)
        return made

    def matrices(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[list[str], int]]:
        """Yields for each call of linear() and stack() the names of the tensors that fill its matrix, and its columns.
        weights: the views that they fill."""
        filled: dict[int, list[str]] = {}
        for name, view in weights.items():
            filled.setdefault(id(view.untyped_storage()), []).append(name)
        for made in self._made:
            yield filled.get(id(made.untyped_storage()), []), made.shape[-1]
