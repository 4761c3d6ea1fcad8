"""Weights to which the LoRA adapters of a forward's rows add their part."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.workers.kernels.adapter_linear import AdapterMatrices
from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.choice import choose_adapter_kernels
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.weights.weight import Projection, Weight

ORDER = "adapter_order"


class AdapterRows:
    """The adapter of each row of the forward that is launched next. All layers of one model share it.

    Set it before launching a forward. The layers of a decoder leave out rows as they do with x.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None  # int64 [T], negative for rows without; None: no row has one

    def use(self, slots: Tensor | None) -> None:
        """slots: int64 [T] on the model's device, of the rows of the next forward."""
        self.slots = slots

    def keep(self, rows: Tensor) -> None:
        """Reduces the forward to these of its rows from here on, int64 [n]."""
        if self.slots is not None:
            self.slots = self.slots.index_select(0, rows)


@dataclass(frozen=True, eq=False)
class Ordered(Weight):
    """A weight whose owner may put rows into another order; `order` remembers which row stood where."""

    base: Weight
    order: Tensor  # int64 [rows]

    @property
    def rows(self) -> int:
        return self.base.rows

    @property
    def columns(self) -> int:
        return self.base.columns

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def device(self) -> torch.device:
        return self.base.device

    def tensors(self) -> dict[str, Tensor]:
        return {**self.base.tensors(), ORDER: self.order}

    def slice(self, begin: int, end: int) -> Weight:
        return Ordered(self.base.slice(begin, end), self.order[begin:end])

    def tensor(self) -> Tensor:
        return self.base.tensor()

    def look_up(self, rows: Tensor) -> Tensor:
        return self.base.look_up(rows)

    def plain(self) -> Linear | None:
        return self.base.plain()

    def linear(self, x: Tensor) -> Tensor:
        return self.base.linear(x)

    def prepare(self, *, shared: bool = False) -> Projection:
        return self.base.prepare(shared=shared)


@dataclass(frozen=True, eq=False)
class Adapted(Ordered):
    """plain() is the weight without its adapters: who takes that for a product asks Projection.is_adapted first."""

    matrices: AdapterMatrices
    adapter_rows: AdapterRows

    def prepare(self, *, shared: bool = False) -> Projection:
        return AdaptedProjection(self.base.prepare(shared=shared), self.matrices, self.adapter_rows)


class AdaptedProjection(Projection):
    """The product of a weight in whichever form, and what adapters add to it."""

    def __init__(self, base: Projection, matrices: AdapterMatrices, rows: AdapterRows) -> None:
        self._base, self._matrices, self._rows = base, matrices, rows
        self._kernels = choose_adapter_kernels(matrices.a.device)

    @property
    def is_adapted(self) -> bool:
        return self._rows.slots is not None

    @property
    def streamed_gemm(self) -> StreamedGemm | None:
        return self._base.streamed_gemm

    def linear(self, x: Tensor) -> Tensor:
        if (slots := self._rows.slots) is None:
            return self._base.linear(x)
        return self._kernels.add_to(partial(self._base.linear, x), x, self._matrices, slots)

    def in_parts(self, x: Tensor) -> Tensor:
        return self._base.in_parts(x) if self._rows.slots is None else self.linear(x)


@dataclass(frozen=True, eq=False)
class AdaptedPart:
    """This rank's part of a checkpoint's weight to which adapters may add: n consecutive rows of an Adapted weight, of
    K columns."""

    name: str  # in the checkpoint, without `.weight`
    rows: int
    columns: int
    a: int  # where its A [R, K] begins in a slot's numbers
    b: int  # where its B [n, R] begins
    order: Tensor  # int64 [n]: row i is row order[i] - order.min() of those that the checkpoint gives this rank


@dataclass(frozen=True, eq=False)
class AdaptedWeights:
    """All that adapters can change of a model: its parts by name, and memory for adapters on the model's device."""

    parts: Mapping[str, AdaptedPart]
    memory: Tensor  # [S, numbers], a slot for each adapter, in the model's dtype
    rank: int  # R, the largest of an adapter
    rows: AdapterRows
    matrices: tuple[AdapterMatrices, ...]  # of all weights

    def compile(self) -> None:
        """Compiles the kernels for products of all shapes."""
        kernels = choose_adapter_kernels(self.memory.device)
        for one in {(one.a.shape, one.b.shape, len(one.ends)): one for one in self.matrices}.values():
            kernels.compile(one)

    @property
    def num_slots(self) -> int:
        return self.memory.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self.memory[0].nbytes

    def views(self, part: AdaptedPart, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """A [R, K] and B [n, R] of a part in the numbers of one slot, [numbers]."""
        a, b = self.rank * part.columns, part.rows * self.rank
        return numbers[part.a : part.a + a].view(-1, part.columns), numbers[part.b : part.b + b].view(-1, self.rank)
