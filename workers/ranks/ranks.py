"""The collectives of a worker's ranks: all-reduce and all-gather."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm
from tandem.workers.weights.weight import Projection, Weight

SHIFTS = (0, 16, 32, 48)


class Ranks(Protocol):
    """One rank's view of its worker's ranks. All ranks make the same calls in the same order, with matching shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of all ranks' x [T, H]. It may overwrite x. It adds in float32 in the order of ranks and
        rounds to the dtype of x once, so all ranks get the same bits. Raises RankLost."""
        ...

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """All-gather: [T, columns], the columns of all ranks' x [T, C] in the order of ranks. C is the rank's part of
        `columns` by Shard.some(). Raises RankLost."""
        ...


class Alone:
    """The only rank of a worker with one process."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, columns: int) -> Tensor:
        return x


ALONE: Ranks = Alone()


def sum_words(ranks: Ranks, word: int, device: torch.device) -> int:
    """The sum of all ranks' 64-bit words, modulo 2⁶⁴. It sums digits of 16 bits, which float32 does exactly."""
    if ranks.size == 1:
        return word
    digits = torch.tensor([[word >> shift & 0xFFFF for shift in SHIFTS]], dtype=torch.float32, device=device)
    summed = ranks.sum(digits)[0].tolist()
    return sum(int(digit) << shift for digit, shift in zip(summed, SHIFTS, strict=True)) & (1 << 64) - 1


class SummedProjection:
    """A row-parallel product: each rank multiplies by its columns of the matrix, and all-reduce adds the results."""

    def __init__(self, part: Projection, ranks: Ranks) -> None:
        self._part, self._sum = part, ranks.sum

    def linear(self, x: Tensor) -> Tensor:
        return self._sum(self._part.linear(x))

    def in_parts(self, x: Tensor) -> Tensor:
        """Does what linear() does: the sum of all ranks has no parts."""
        return self.linear(x)

    @property
    def is_adapted(self) -> bool:
        return self._part.is_adapted

    @property
    def streamed_gemm(self) -> StreamedGemm | None:
        return self._part.streamed_gemm


def prepare_summed(weight: Weight, ranks: Ranks) -> Projection:
    """The product with a matrix whose columns the ranks divide. Only rank 0 adds the bias."""
    if ranks.size == 1:
        return weight.prepare()
    drop_bias(weight, ranks)
    return SummedProjection(weight.prepare(), ranks)


def drop_bias(weight: Weight, ranks: Ranks) -> None:
    """Zeroes the bias on all ranks but the first, because the all-reduce adds all ranks' products."""
    bias = weight.tensors().get("bias")
    if bias is not None and ranks.rank:
        bias.zero_()


def held_experts(held: range) -> Callable[[Tensor], Tensor]:
    """Maps numbers of experts, int64 of any shape, to their index among the `held` ones, and others to len(held)."""
    first, count = held.start, len(held)

    def numbers(experts: Tensor) -> Tensor:
        own = experts - first
        return torch.where((own >= 0) & (own < count), own, count)

    return numbers
