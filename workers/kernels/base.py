"""The interfaces of kernels: between the projections of a decoder layer, GEMMs of few rows, hyper-connections,
samplers, and drafts by prompt lookup."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

# Sources up to this one: the row is of sequence FOLLOWS - source of the verify step before. See DraftKernels.
FOLLOWS = -2


class LayerKernels(Protocol):
    """Each call reads and makes tensors of one device; T tokens, H hidden, I intermediate, D head_dim.

    Rounding is transformers': sums in the dtype of x, norms in float32, cast to that dtype before the weight; with a
    float32 weight with an x of 16 bits, after the weight.
    """

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] += delta [T, H] in place, where there is one; the result / its rms · weight [H], as a new tensor.
        delta may be float32 [n, T, H]: parts, whose sum is rounded first."""
        ...

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Each row of heads [T, heads, D] (rows of tokens may lie apart) / its rms · weight [heads, D]; contiguous."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) · up [T, I] of gate_up [T, 2·I], gate first."""
        ...

    def clamped_swiglu(self, gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
        """gate · sigmoid(alpha · gate) · (up + 1) [T, I] of gate_up [T, 2·I], where gate and up alternate.

        Before that gate is clamped to at most limit, and up to -limit … limit.
        """
        ...


class DeltaKernels(Protocol):
    """The operations of a layer with a gated delta rule before and after its state. T tokens; Hv value heads of Dv
    stand in G groups, in order. Last dimensions are dense. Rounding is transformers'.
    """

    def rates(self, b: Tensor, a: Tensor, decay: Tensor, decay_bias: Tensor) -> tuple[Tensor, Tensor]:
        """decay · softplus(a + decay_bias) and sigmoid(b), which is rounded to the dtype of b: float32 [T, Hv]. b and a
        [T, G, Hv / G], decay and decay_bias float32 [Hv]."""
        ...

    def gate(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        """o [T, Hv, Dv], contiguous, / the rms of each head · weight [Dv] · silu(z), in the dtype of o [T, Hv · Dv];
        z [T, G, Hv · Dv / G]."""
        ...


@dataclass(frozen=True, eq=False)
class RmsNorm:
    """The norm of a row before a GEMM: row / its root mean square · weight, in float32.

    With one row the result is not rounded; with several it is rounded where LayerKernels' norm is.
    """

    weight: Tensor  # [in]
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A linear layer x → x · weightᵀ + bias, or one for each of E experts."""

    weight: Tensor  # [out, in]; [E, out, in]
    bias: Tensor | None = None  # [out]; [E, out]

    @property
    def scaled(self) -> "ScaledLinear | None":
        """The weight with its scales, if it has any."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class ScaledLinear(Linear):
    """A linear layer whose weight is in 8 bits, E4M3. Each number counts times the scale of its rows and columns."""

    scales: Tensor = field(kw_only=True)  # float32 [out / row_block, in / group]; [E, …]; rounded up
    row_block: int = field(kw_only=True)  # rows that share scales
    group: int = field(kw_only=True)  # columns that share a scale

    @property
    def scaled(self) -> "ScaledLinear":
        return self


class FusedGemms(Protocol):
    """GEMMs of few rows with the operations around them in a layer: the norm before, silu or the residual after.

    x [T, in]; weights contiguous and in the dtype of x; norm: of x, before. They accumulate in float32.
    With one row they also take a ScaledLinear.
    """

    def linear(self, x: Tensor, weights: Linear, norm: RmsNorm | None = None) -> Tensor:
        """Returns x · weightᵀ + bias [T, out]."""
        ...

    def linear_silu_mul(self, x: Tensor, weights: Linear, norm: RmsNorm) -> Tensor:
        """silu(gate) · up [T, out / 2] of linear's halves, gate first; rounded where silu_mul rounds."""
        ...

    def add_linear(self, residual: Tensor, x: Tensor, weights: Linear) -> None:
        """Adds x · weightᵀ + bias to residual [T, out]."""
        ...


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """The parameters that make K weights of N streams, float32: `fn` [K, N·H], `scale` and `base` [K]."""

    fn: Tensor
    base: Tensor
    scale: Tensor  # [3]: to collapse, to expand, to mix; of the head [1]


@dataclass(frozen=True, slots=True)
class HyperSettings:
    """iterations: of the normalisation of rows and columns. norm_eps: of the norm of all streams of a token."""

    iterations: int
    eps: float
    norm_eps: float


class HyperKernels(Protocol):
    """Around a block whose residual is N streams; streams [T, N, H], contiguous, in 16 bits or float32.

    Sums are float32. close() rounds post, mix, the expanded output and the mixed streams to the dtype of streams.
    """

    def open(
        self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the block's input, [T, H] in the dtype of streams, and float32 post [T, N] and mix [T, N, N] for
        close(). parameters: of K = 2·N + N² weights."""
        ...

    def close(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        """The streams after a block that gave output [T, H]: Stream i is post[i] · output + Σ over j of mix[j, i] ·
        streams[j]."""
        ...

    def collapse(self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings) -> Tensor:
        """Returns the input of the last norm, [T, H] in the dtype of streams. parameters: of K = N weights."""
        ...


class SamplingInputs(NamedTuple):
    """How each row's token is sampled: [at least n] each. Samplers round all float64 but uniforms to float32."""

    uniforms: Tensor  # float64, in [0, 1)
    parameters: Mapping[str, Tensor]  # float64 or int64: those of tandem.workers.sampling.sampling_params.ROW


class Sampler(Protocol):
    """Samples the tokens of a step's n rows (int64) and hands them to the next step; the host takes no part."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        """[n]: tokens [n] where sources [n] is negative, elsewhere last[sources], or 0 for NOT_FINITE."""
        ...

    def sample(self, logits: Tensor, sampling: SamplingInputs, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        """Samples a token for each row of logits [n, vocab], whose rows are contiguous, into last [at least n].

        Below the temperature GREEDY_BELOW it is the first of the row's best tokens. A row whose best logit is not
        finite, or that has NaN, gets NOT_FINITE. ticket | token goes into the row's word, in pinned memory where the
        device is a GPU.

        tickets: [at least n], see posted_samples; 0: nothing is posted. words: [2, at least n]; the ticket chooses the
        half.
        """
        ...


@dataclass(frozen=True, eq=False)
class RuleTables:
    """The states of rows whose logits are processed, one a slot: see tandem.workers.sampling.logit_rules."""

    seen: Tensor  # int16 [slots, vocab]
    allowed: Tensor  # int32 [slots, ceil(vocab / 32)]
    records: Tensor  # int32 [slots, RECORD]


class LogitsKernels(Protocol):
    """Process a step's logits between the model and the Sampler, and keep the states that this takes."""

    def process(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: RuleTables) -> Tensor:
        """The processed logits, float32 [n, vocab], of logits [n, vocab] in 16 bits or float32, which stay as they are.

        slots: int64 [n], negative for rows that only change their dtype. positions: int64 [n], of the tokens that are
        sampled next.
        """
        ...

    def count(self, slots: Tensor, tokens: Tensor, tables: RuleTables) -> None:
        """The rows' states have these output tokens more: int64 [at least n], NOT_FINITE for none. slots: as
        above."""
        ...


@dataclass(frozen=True, eq=False)
class Histories:
    """The tokens of a verify step's S sequences, prompt and output, on the device; contiguous, int32.

    Sequence i of the step has row i.
    """

    tokens: Tensor  # [S, L]; drafts may stand after those that are known
    lengths: Tensor  # [S], how many of a sequence's tokens are known; more than L where some found no place
    surplus: Tensor  # [S], rows of the last verify step that did not hold


class FollowingRows(NamedTuple):
    """The T rows of a verify step that is launched before the one before is read, or of another. Tensors [T].

    Its positions are as if all drafts of the step before held.
    """

    tokens: Tensor  # int64, inputs
    sources: Tensor  # int64, those of rows that follow are FOLLOWS or less
    positions: Tensor  # int64, where the inputs stand in their sequences
    uniforms: Tensor  # int64, the bits of float64 to sample with; of rows that follow, their seeds' bits
    preceding: Tensor  # int32, see DraftKernels


class EnteringRows(NamedTuple):
    """The n rows of a chain of steps that draft, after a verify step that is not read. Tensors [n].

    The host plans the chain's last step, as if all drafts of the verify step held.
    """

    sources: Tensor  # int64, of sequence i FOLLOWS - i; of padding more
    positions: Tensor  # int64, where the input of the chain's first step would stand then
    seeds: Tensor  # int64, their bits
    steps: Tensor  # int64, planned between the first and the last that move the row


class Entered(NamedTuple):
    """The inputs of the n rows of one step of a chain. Tensors [n]."""

    tokens: Tensor  # int64, inputs; 0 for padding
    uniforms: Tensor  # int64, the bits of float64 to sample with; the seeds of padding
    shift: Tensor  # int32, how many positions earlier the row stands than it did; 0 for padding


class DraftKernels(Protocol):
    """Drafts by prompt lookup for a verify step that is launched before the host reads the previous step's tokens.

    Both calls can be captured in a CUDA graph: The host does not wait, and shapes are fixed. A step has T rows. Rows of
    a sequence are consecutive. preceding: int32 [T], how many of the rows right before a row are of its sequence.
    Sequence i begins at the i-th row with 0.
    """

    def accept(
        self, tokens: Tensor, sampled: Tensor, positions: Tensor, preceding: Tensor, histories: Histories
    ) -> None:
        """Adds the tokens that a verify step found to the histories of its sequences.

        A row holds if it is the first of its sequence, or if the row before it holds and sampled this row's token. What
        a row that holds sampled goes to its position + 1 in its history, if that is below L. The length becomes the
        position of the last such row + 2; surplus becomes the number of rows that do not hold. Sequences from S on are
        padding, and nothing is kept.

        tokens: int64 [T], the step's inputs. sampled: int64 [at least T], what was sampled after each. positions:
        int64 [T], where the inputs stand in their sequences.
        """
        ...

    def follow(self, rows: FollowingRows, histories: Histories, max_ngram: int) -> Tensor:
        """Fills in, in place, the input token of each row whose source is up to FOLLOWS, and the number with which the
        next token is sampled: tandem.workers.sampling.random.uniform of its seed and position.

        The first row of sequence i gets the last token of its history. Row j gets the j-th token that look_up() of
        tandem.workers.speculation.ngram finds in the history with max_ngram; where that is 0, the j-th after the
        history, where a drafter has put it. A row gets 0 in place of NOT_FINITE, and where there is no such token.

        i = FOLLOWS - source is below S. Returns shift, int32 [T]: the sequence's surplus for these rows, 0 for all
        others. So many positions earlier a row stands.
        """
        ...

    def enter(self, rows: EnteringRows, number: int, ahead: int, histories: Histories) -> Entered:
        """Returns the inputs of step `number` of a chain, from 0.

        A token is the last of the sequence's history, or what stands `number` after it, as follow() with max_ngram 0
        finds it. It is at its row's position + number - surplus; the token after it is sampled with the number for
        that. ahead: so many steps before the first that moves rows; until then the shift is the surplus. The first one
        moves them back by surplus + steps, and then the first `steps` ones each by a position on.
        """
        ...

    def put(self, sources: Tensor, drafted: Tensor, number: int, histories: Histories) -> None:
        """Writes draft `number`, from 0, of each sequence after its history, where follow() with max_ngram 0 finds it.

        sources: int64 [n], as for follow(); other rows are padding. drafted: int64 [at least n]. What would stand from
        L on is left out.
        """
        ...
