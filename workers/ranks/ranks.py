"""What the ranks of a worker compute together: sums and gatherings of their parts."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.weights.weight import Projection, Weight

SHIFTS = (0, 16, 32, 48)


class Ranks(Protocol):
    """A worker's ranks, as one of them sees them. All ranks make the same calls in the same order, with like shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x [T, H], which may be overwritten. It is added up in float32 in the order of ranks and
        then rounded to the dtype of x, so all ranks get the same bits. Raises RankLost."""
        ...

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """[T, columns]: those of each rank's x [T, C] in the order of ranks. C is what Shard.some() gives it of
        `columns`. Raises RankLost."""
        ...


class Alone:
    """The one rank of a worker with one GPU."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, columns: int) -> Tensor:
        return x


ALONE: Ranks = Alone()


def sum_words(ranks: Ranks, word: int, device: torch.device) -> int:
    """The sum of all ranks' words of 64 bits, modulo 2⁶⁴, by digits of 16 bits, which float32 adds up exactly."""
    if ranks.size == 1:
        return word
    digits = torch.tensor([[word >> shift & 0xFFFF for shift in SHIFTS]], dtype=torch.float32, device=device)
    summed = ranks.sum(digits)[0].tolist()
    return sum(int(digit) << shift for digit, shift in zip(summed, SHIFTS, strict=True)) & (1 << 64) - 1


class SummedProjection:
    """A product of which each rank has some columns of the matrix: the sum of all ranks' parts of it."""

    def __init__(self, part: Projection, ranks: Ranks) -> None:
        self._part, self._sum = part, ranks.sum

    def linear(self, x: Tensor) -> Tensor:
        return self._sum(self._part.linear(x))

    def in_parts(self, x: Tensor) -> Tensor:
        """As linear(): the sum of all ranks has no parts."""
        return self.linear(x)

    @property
    def streamed_gemm(self) -> StreamedGemm | None:
        return self._part.streamed_gemm


def prepare_summed(weight: Weight, ranks: Ranks) -> Projection:
    """The product with a matrix whose columns the ranks divide. Its bias is added once, by rank 0."""
    if ranks.size == 1:
        return weight.prepare()
    drop_bias(weight, ranks)
    return SummedProjection(weight.prepare(), ranks)


def drop_bias(weight: Weight, ranks: Ranks) -> None:
    """Sets the bias to zero on all ranks but the first, where all ranks' products are added up."""
    bias = weight.tensors().get("bias")
    if bias is not None and ranks.rank:
        bias.zero_()


def held_experts(held: range) -> Callable[[Tensor], Tensor]:
    """From numbers of experts, int64 of any shape, to those among the `held` ones; len(held) for all others."""
    first, count = held.start, len(held)

    def numbers(experts: Tensor) -> Tensor:
        own = experts - first
        return torch.where((own >= 0) & (own < count), own, count)

    return numbers
