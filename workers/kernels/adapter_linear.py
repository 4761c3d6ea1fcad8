"""The kernels of LoRA adapters, which add to each row of a product by the row's own adapter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterMatrices:
    """The matrices of S slots, each with one adapter or none, for a weight [N, K] of P parts: consecutive rows that are
    weights of their own in a checkpoint. Adapters have rank R; adapters of a smaller rank are padded with zeros.

    A slot's matrices are contiguous, and slots lie one stride apart. Both have the dtype of x.
    """

    a: Tensor  # [S, P·R, K]
    b: Tensor  # [S, N, R], its adapter's scale included
    ends: tuple[int, ...]  # P ascending numbers, the last one N: where each part ends among the rows
    on_device: Tensor  # int32 [P], ends

    @property
    def rank(self) -> int:
        return self.b.shape[2]


class AdapterKernels(Protocol):
    """Can be captured in a CUDA graph: shapes depend on the arguments' shapes, and nothing is read on the host."""

    def add(self, y: Tensor, x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> None:
        """y[t, n] += Σ over r of (x[t] · a[slot, p·R + r]) · b[slot, n, r], for the part p of n, in place.

        y [T, N] and x [T, K] in 16 bits or float32, contiguous rows. slots: int64 [T], each row's; rows of a negative
        slot stay as they are. Sums are float32, and rounded once. What one row's adapter holds changes no other row,
        even where that is not finite.
        """
        ...

    def add_to(self, product: Callable[[], Tensor], x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> Tensor:
        """Computes product(), whose rows are contiguous, then add(). In a graph they overlap."""
        y = product()
        self.add(y, x, matrices, slots)
        return y

    def compile(self, matrices: AdapterMatrices) -> None:
        """Compiles all kernels that add() needs for such matrices and any number of rows, so that no later step waits
        for them."""
        ...
