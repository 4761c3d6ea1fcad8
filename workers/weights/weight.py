"""The weights that layers multiply by. Nobody else knows in which form memory holds it."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm

Parts = tuple[tuple[str, int], ...]
"""Names and numbers of rows of the tensors that one fused weight takes."""


class Projection(Protocol):
    """Maps x [T, columns] to x · matrixᵀ + bias [T, rows]."""

    def linear(self, x: Tensor) -> Tensor: ...

    def in_parts(self, x: Tensor) -> Tensor:
        """The same for LayerKernels.add_rms_norm, which also takes parts of a sum: float32 [n, T, rows]."""
        return self.linear(x)

    @property
    def is_adapted(self) -> bool:
        """Whether adapters add to the product in the forward that is launched next."""
        return False

    @property
    def streamed_gemm(self) -> StreamedGemm | None:
        """The kernel for the rows of a decode step, which a layer chains; None: there is none."""
        return None


class Weight(Projection, Protocol):
    """A matrix [rows, columns] and its bias, if it has one. A checkpoint fills it, and then a layer prepares it."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x and of the product."""
        ...

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors in memory, by the last part of their names in a checkpoint: `weight`, `bias`. Each tensor
        is [rows, …], and its owner may put rows into another order, in place."""
        ...

    def slice(self, begin: int, end: int) -> "Weight":
        """A view of rows begin … end - 1: one of several weights that are fused."""
        ...

    def tensor(self) -> Tensor:
        """The matrix [rows, columns] in dtype, for products of other shapes than linear()."""
        ...

    def look_up(self, rows: Tensor) -> Tensor:
        """Returns the matrix's rows, int64 [T], as a new tensor [T, columns]."""
        return self.tensor()[rows]

    def plain(self) -> Linear | None:
        """Returns the matrix for kernels that do more than multiply. None: memory does not hold the matrix as such."""
        return None

    def prepare(self, *, shared: bool = False) -> Projection:
        """The fastest product with what the weight holds now. That may take a copy, unless others share the weight."""
        return self

    def named(self, name: str) -> dict[str, Tensor]:
        """Returns tensors() by their whole names in a checkpoint."""
        return {f"{name}.{kind}": tensor for kind, tensor in self.tensors().items()}


class WeightStack(Protocol):
    """Weights of one shape, as experts have them."""

    @property
    def count(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> dict[str, Tensor]:
        """See Weight.tensors; [count, rows, …] each, of any strides."""
        ...

    def one(self, index: int) -> Weight:
        """Returns a view of one weight."""
        ...

    def prepare(self) -> Callable[[Tensor], Tensor]:
        """x [count, T, columns] → [count, T, rows], by each weight without its bias."""
        ...

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        """See GroupedLinear."""
        ...

    def prepare_grouped(self) -> Callable[[Tensor, ExpertBlocks, Tensor | None, int], Tensor]:
        """Returns the fastest grouped() for what the stack holds now."""
        return self.grouped


def tensor_name(name: str, kind: str) -> str:
    """Names another tensor of the weight whose matrix is called `name`: `X.weight`, or `X` for the experts of a layer
    in one tensor."""
    module = name.removesuffix(".weight")
    return name if kind == "weight" else f"{module}_{kind}" if module == name else f"{module}.{kind}"


def split_weights(prefix: str, fused: Weight, parts: Parts) -> dict[str, Tensor]:
    """Returns the tensors of each part, by their names in a checkpoint."""
    ends = list(accumulate((count for _, count in parts), initial=0))
    slices = [fused.slice(*rows).tensors() for rows in pairwise(ends)]
    return {
        f"{prefix}.{name}.{kind}": one[kind]
        for kind in fused.tensors()
        for (name, _), one in zip(parts, slices, strict=True)
    }
