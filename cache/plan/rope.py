"""Rotary position embeddings as Hugging Face checkpoints define them (transformers' modeling_rope_utils)."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.cache.plan.arrays import check_factor, integer
from tandem.cache.plan.errors import InvalidArgument

ROPE_TYPES = ("none", "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class RopeParameters:
    """How q and k are rotated. Fields are named as in config.json; those that rope_type does not read are ignored.

    rotary_dim: the leading elements of a head that are rotated, all or, with a partial_rotary_factor, fewer. Of
    "proportional" it is the head; partial_rotary_factor says how many of its frequencies are not 0.
    max_position_embeddings is read by "dynamic", original_max_position_embeddings by "llama3", "yarn" and "longrope".
    short_factor, long_factor: rotary_dim / 2 numbers each for "longrope", of sequences up to and beyond
    original_max_position_embeddings.
    Raises InvalidArgument when a field is out of range or one that rope_type needs is missing.
    """

    rope_type: str
    rotary_dim: int
    theta: float = 10000.0
    factor: float = 1.0
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the length of the sequence decides how its tokens are rotated."""
        return self.rope_type in ("dynamic", "longrope")

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise InvalidArgument(f"rope_type is {self.rope_type!r}; it must be one of {', '.join(ROPE_TYPES)}")
        if self.rope_type == "none":
            return
        if integer("rotary_dim", self.rotary_dim) < 2 or self.rotary_dim % 2:
            raise InvalidArgument(f"rotary_dim is {self.rotary_dim}; it must be even and at least 2")
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            check_factor(name, getattr(self, name))
        if self.rope_type == "dynamic":
            self._require("max_position_embeddings")
            if self.rotary_dim < 4:
                raise InvalidArgument(f"rotary_dim is {self.rotary_dim}; rope_type 'dynamic' needs at least 4")
        if self.rope_type == "llama3":
            self._require("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        if self.rope_type == "yarn":
            self._require("original_max_position_embeddings")
            if self.theta == 1:
                raise InvalidArgument(f"theta is {self.theta}; rope_type 'yarn' needs another than 1")
        if self.rope_type == "longrope":
            self._check_longrope()
        if self.rope_type == "proportional" and not 0 < self.partial_rotary_factor <= 1:
            raise InvalidArgument(
                f"partial_rotary_factor is {self.partial_rotary_factor}; it must be above 0, and at most 1"
            )
        if self.rope_type in ("yarn", "longrope") and self.attention_factor is not None:
            check_factor("attention_factor", self.attention_factor)

    def _require(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None or not 0 < value < math.inf:
                raise InvalidArgument(f"{name} is {value}; rope_type {self.rope_type!r} needs a number above 0")

    def _check_longrope(self) -> None:
        self._require("original_max_position_embeddings")
        if self.original_max_position_embeddings == 1:
            raise InvalidArgument("original_max_position_embeddings is 1; rope_type 'longrope' needs at least 2")
        needed = self.rotary_dim // 2
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if len(factors) != needed or not all(0 < one < math.inf for one in factors):
                raise InvalidArgument(f"{name} is {factors}; rope_type 'longrope' needs {needed} numbers above 0")


@dataclass(frozen=True)
class Rotation:
    """Factors of the rotation of T tokens: x · cos + roll(x, rotary_dim / 2) · signed_sin.

    table: [n, 2, rotary_dim] in the dtype of q and k, cos and signed_sin, the first half of which is −sin. rows: int64
    [T], the row of each token; None: token t has row t. Kernels that look up by themselves spare a step the copies.
    """

    table: Tensor
    rows: Tensor | None = None

    @cached_property
    def factors(self) -> Tensor:
        """The factors of each token, [T, 2, rotary_dim]."""
        return self.table if self.rows is None else self.table[self.rows]

    @cached_property
    def cos(self) -> Tensor:
        """[T, 1, rotary_dim]."""
        return self.factors[:, :1]

    @cached_property
    def signed_sin(self) -> Tensor:
        """[T, 1, rotary_dim]."""
        return self.factors[:, 1:]

    def between(self, begin: int, end: int) -> "Rotation":
        """The rotation of tokens begin … end - 1."""
        return Rotation(self.factors[begin:end])

    def apply(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim] rotated; the elements from rotary_dim on are kept."""
        size = self.cos.shape[-1]
        head = x if x.shape[-1] == size else x[..., :size]
        rotated = (head * self.cos).addcmul_(head.roll(size // 2, -1), self.signed_sin)
        return rotated if head is x else torch.cat((rotated, x[..., size:]), -1)

    def apply_both(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates q and k in one go."""
        rotated_q, rotated_k = self.apply(join_heads(q, k)).split_with_sizes((q.shape[1], k.shape[1]), 1)
        return rotated_q, rotated_k


def rotate_last(x: Tensor, still: int, rotation: Rotation | None) -> Tensor:
    """x [T, heads, still + rotated] with the last numbers of each head rotated."""
    if rotation is None:
        return x
    return rotation.apply(x) if still == 0 else torch.cat((x[:, :, :still], rotation.apply(x[:, :, still:])), 2)


def join_heads(q: Tensor, k: Tensor) -> Tensor:
    """[T, Hq + Hkv, D] of q and k; without a copy when k follows q in memory, as heads of one projection do."""
    num_heads = q.shape[1]
    neighbours = (
        q.stride() == k.stride()
        and k.data_ptr() == q.data_ptr() + num_heads * q.stride(1) * q.element_size()
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    )
    shape = (q.shape[0], num_heads + k.shape[1], q.shape[2])
    return q.as_strided(shape, q.stride()) if neighbours else torch.cat((q, k), 1)


class RotaryEmbedding:
    """cos and sin of positions below max_positions, from a table; only "dynamic" beyond its length computes anew."""

    def __init__(
        self, parameters: RopeParameters, max_positions: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """dtype: of q and k."""
        self._parameters = parameters
        self._dtype = dtype
        inv_freq, self._scale = inverse_frequencies(parameters)
        self._inv_freq = inv_freq.to(device)
        self._max_positions = max_positions
        self._trained_length = parameters.max_position_embeddings or 0  # "dynamic" scales longer sequences
        self._switch_length = parameters.original_max_position_embeddings or 0  # "longrope": the longest of the short
        positions = torch.arange(max_positions, device=device)
        lengths = torch.zeros_like(positions)
        if parameters.rope_type == "longrope":  # first the rows of short sequences, then those of long ones
            positions = positions.repeat(2)
            lengths = torch.cat((lengths, lengths + self._switch_length + 1))
        # [rows, 2, rotary_dim]; the last row rotates nothing.
        factors = self._factors(positions, lengths)
        still = torch.stack((torch.ones_like(factors[:1, 0]), torch.zeros_like(factors[:1, 0])), 1)
        self._table = torch.cat((factors, still))
        self.of_indices = Rotation(self._table)  # of positions 0, 1, …, not by_length

    def rotation(self, positions: Tensor, rope_lengths: Tensor | None = None) -> Rotation:
        """Returns the rotation of cos_sin, as factors in the dtype and on the device given at construction. Arguments
        may be on any device.

        Unless by_length, position max_positions is left as it is.
        """
        device = self._table.device
        if self._parameters.by_length:
            lengths = positions + 1 if rope_lengths is None else rope_lengths
            if self._parameters.rope_type == "longrope":
                positions = positions + (lengths > self._switch_length) * self._max_positions
            elif int(lengths.max()) > self._trained_length:
                return Rotation(self._factors(positions.to(device), lengths.to(device)))
        return Rotation(self._table, positions.to(device))

    def cos_sin(self, positions: Tensor, rope_lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, rotary_dim] each, both halves alike, as transformers' rotary modules return them.

        positions: int64 [T], below max_positions. rope_lengths: int64 [T], when by_length the length of the sequence
        in the forward that computes the token (transformers: the prompt's, or position + 1 later); None: position + 1.
        """
        inv_freq, lengths = self._inv_freq, positions + 1 if rope_lengths is None else rope_lengths
        if self._parameters.rope_type == "dynamic":
            scaled = dynamic_inverse_frequencies(self._parameters, lengths.clamp(min=self._trained_length))
            inv_freq = torch.where((lengths > self._trained_length)[:, None], scaled, inv_freq)
        elif self._parameters.rope_type == "longrope":
            long = longrope_frequencies(self._parameters, self._parameters.long_factor).to(inv_freq.device)
            inv_freq = torch.where((lengths > self._switch_length)[:, None], long, inv_freq)
        angles = positions[:, None].float() * inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self._scale, angles.sin() * self._scale

    def _factors(self, positions: Tensor, rope_lengths: Tensor) -> Tensor:
        """Returns cos and signed sin, [T, 2, rotary_dim]."""
        cos, sin = self.cos_sin(positions, rope_lengths)
        sin[:, : sin.shape[1] // 2].neg_()
        return torch.stack((cos, sin), 1).to(self._dtype)


def inverse_frequencies(parameters: RopeParameters) -> tuple[Tensor, float]:
    """float32 [rotary_dim / 2] and the factor of cos and sin, for sequences no longer than the trained length."""
    base = 1.0 / parameters.theta ** _exponents(parameters.rotary_dim)
    if parameters.rope_type == "linear":
        return base / parameters.factor, 1.0
    if parameters.rope_type == "proportional":
        rotated = int(parameters.partial_rotary_factor * parameters.rotary_dim // 2)
        return torch.cat((base[:rotated], torch.zeros_like(base[rotated:]))) / parameters.factor, 1.0
    if parameters.rope_type == "llama3":
        return _llama3(parameters, base), 1.0
    if parameters.rope_type == "yarn":
        return _yarn(parameters), _attention_factor(parameters)
    if parameters.rope_type == "longrope":
        return longrope_frequencies(parameters, parameters.short_factor), _attention_factor(parameters)
    return base, 1.0


def dynamic_inverse_frequencies(parameters: RopeParameters, lengths: Tensor) -> Tensor:
    """float32 [T, rotary_dim / 2] for sequences of `lengths` (int64 [T]): NTK-aware scaling by the current length."""
    assert parameters.max_position_embeddings is not None
    dim, factor = parameters.rotary_dim, parameters.factor
    growth = (factor * lengths / parameters.max_position_embeddings) - (factor - 1)
    theta = parameters.theta * growth ** (dim / (dim - 2))
    return 1.0 / (theta[:, None] ** _exponents(dim, lengths.device))


def _exponents(dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, dim, 2, device=device).float() / dim


def _llama3(parameters: RopeParameters, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by factor, short ones kept, those between interpolated."""
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    length, factor = parameters.original_max_position_embeddings, parameters.factor
    assert low is not None
    assert high is not None
    assert length is not None
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    if low == high:  # nothing lies between, as in Llama 4
        return stretched
    smooth = (length / wavelength - low) / (high - low)
    between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(between, (1 - smooth) * stretched / factor + smooth * stretched, stretched)


def _yarn(parameters: RopeParameters) -> Tensor:
    """YaRN (Peng et al., 2023): interpolate slow dimensions, extrapolate fast ones, a linear ramp between."""
    dim, length = parameters.rotary_dim, parameters.original_max_position_embeddings
    assert length is not None

    def dimension_that_turns(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(parameters.theta))

    low, high = dimension_that_turns(parameters.beta_fast), dimension_that_turns(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = parameters.theta ** _exponents(dim)
    return 1.0 / (parameters.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _attention_factor(parameters: RopeParameters) -> float:
    """The factor of "yarn" and "longrope", also for short sequences. It grows with the factor by which the model was
    stretched."""
    factor = parameters.factor
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.rope_type == "longrope":
        trained = parameters.original_max_position_embeddings
        assert trained is not None
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    if parameters.mscale and parameters.mscale_all_dim:
        return yarn_magnitude(factor, parameters.mscale) / yarn_magnitude(factor, parameters.mscale_all_dim)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """The factor by which q and k each sharpen the scores of a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_frequencies(parameters: RopeParameters, factors: tuple[float, ...]) -> Tensor:
    """LongRoPE (Ding et al., 2024): float32 [rotary_dim / 2], each frequency less by its factor."""
    return 1.0 / (torch.tensor(factors) * parameters.theta ** _exponents(parameters.rotary_dim))
