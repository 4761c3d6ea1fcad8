"""What a backend's kernels do between the projections of a decoder layer."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class LayerKernels(Protocol):
    """Each call reads and makes tensors of one device; T tokens, H hidden, I intermediate, D head_dim.

    Rounding is transformers': sums in the dtype of x, norms in float32, cast to that dtype before the weight; with a
    float32 weight beside an x of 16 bits, after the weight.
    """

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] += delta [T, H] in place, where there is one; the result / its rms · weight [H], as a new tensor.
        delta may be float32 [n, T, H]: parts, whose sum is rounded first."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of heads [T, heads, D] (rows of tokens may lie apart) / its rms · weight [heads, D]; contiguous."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up [T, I] of gate_up [T, 2·I], gate first."""
        ...


@dataclass(frozen=True, eq=False)
class RowNorm:
    """A row becomes itself / its root mean square · weight [in], in float32; of one row it is not rounded, of several
    where LayerKernels' norm is."""

    weight: Tensor
    eps: float


class RowKernels(Protocol):
    """Products of few rows x [T, in] and weight [out, in], contiguous and in the dtype of x, with what stands around
    them in a layer. bias: [out]. norm: what x goes through before. Sums are in float32.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm | None = None) -> Tensor:
        """x · weightᵀ + bias [T, out]."""
        ...

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm) -> Tensor:
        """silu(gate) · up [T, out / 2] of linear's halves, gate first; rounded where silu_mul rounds."""
        ...

    def add_linear(self, total: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """total [T, out] += x · weightᵀ + bias."""
        ...


@dataclass(frozen=True, eq=False)
class RowDraws:
    """How each row's token is drawn, [at least n] each: float64, top_k int64; see torch_sampling, which rounds to
    float32."""

    draws: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor


class StepTokens(Protocol):
    """Token ids of a step's n rows, int64, from one step to the next without a word to the host."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        """[n]: tokens [n] where sources [n] is negative, elsewhere last[sources]."""
        ...

    def keep(self, logits: Tensor, draws: RowDraws, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        """Into last [at least n] what each row of logits [n, vocab], whose rows are contiguous, draws, or the first of
        its best tokens where its temperature is below GREEDY_BELOW; some token where a row has NaN. And ticket | token
        into the row's word, in pinned memory where the device is a GPU.

        tickets: [at least n], see posted_samples; 0: nothing is posted. words: [2, at least n], of which the ticket
        says the half.
        """
        ...
