"""The scales of a cache of 8 bits. Checkpoints carry the scales of K and V. Each latent or index key carries its
own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.plan.arrays import check_factor
from tandem.cache.plan.errors import InvalidArgument

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP_COLUMNS = 128
SCALE_BYTES = 4


@dataclass(frozen=True)
class KVScales:
    """The factors that turn stored entries (float8_e4m3fn) into K and V.

    k, v: for each layer of the model one number for all its KV heads, or one for each.
    """

    k: tuple[tuple[float, ...], ...]
    v: tuple[tuple[float, ...], ...]

    @classmethod
    def uniform(cls, num_layers: int, k: float = 1.0, v: float = 1.0) -> "KVScales":
        return cls(((k,),) * num_layers, ((v,),) * num_layers)

    @property
    def fingerprint(self) -> int:
        """64 bits that are equal exactly for equal scales."""
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=8).digest(), "little")

    def check(self, kv_heads: Sequence[int]) -> None:
        """InvalidArgument unless these are scales for layers with so many KV heads each."""
        for name, scales in (("k", self.k), ("v", self.v)):
            if len(scales) != len(kv_heads):
                raise InvalidArgument(f"scales.{name} is for {len(scales)} layers; the layout has {len(kv_heads)}")
            for layer, (of_layer, heads) in enumerate(zip(scales, kv_heads, strict=True)):
                if len(of_layer) not in (1, heads):
                    accepted = "1 number" if heads == 1 else f"1 or {heads} numbers"
                    raise InvalidArgument(
                        f"scales.{name} has {len(of_layer)} numbers for layer {layer}; it must have {accepted}"
                    )
                for scale in of_layer:
                    check_factor(f"scales.{name} of layer {layer}", scale)


@dataclass(frozen=True)
class Fp8Rows:
    """The bytes of a row of `width` numbers: the first `quantized` as float8_e4m3fn, a float32 scale for each 128 of
    them, then the other numbers unchanged, in `dtype`.

    A scale is the least power of two by which its numbers become at most 448 (as DeepSeek-V3.2 scales index keys). So
    all kernels quantize bit for bit alike, and what they dequantize is exact in float32 and in bfloat16.
    """

    width: int
    quantized: int
    dtype: torch.dtype

    @property
    def group_columns(self) -> int:
        """Numbers that share a scale; the last group may have fewer."""
        return min(GROUP_COLUMNS, self.quantized)

    @property
    def num_groups(self) -> int:
        return -(-self.quantized // self.group_columns)

    @property
    def num_bytes(self) -> int:
        return self.quantized + SCALE_BYTES * self.num_groups + (self.width - self.quantized) * self.dtype.itemsize

    def quantize(self, rows: Tensor) -> Tensor:
        """The bytes of rows [..., width], as float8_e4m3fn [..., num_bytes]. NaN stays NaN."""
        numbers, others = rows.split((self.quantized, self.width - self.quantized), -1)
        missing = self.num_groups * self.group_columns - self.quantized
        groups = F.pad(numbers.float(), (0, missing)).unflatten(-1, (self.num_groups, -1))
        scales = least_powers_of_two(groups.abs().amax(-1))
        # Clamped first: conversion alone makes NaN of what is too large, in some versions of torch.
        entries = (groups / scales.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).flatten(-2)[..., : self.quantized].to(FP8)
        parts = (entries, scales, others)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).view(FP8)

    def dequantize(self, stored: Tensor) -> Tensor:
        """Rows [..., width] of `dtype` from their bytes, 8-bit elements [..., num_bytes]."""
        others = (self.width - self.quantized) * self.dtype.itemsize
        parts = stored.view(torch.uint8).split((self.quantized, SCALE_BYTES * self.num_groups, others), -1)
        # Copied, for a view of wider elements has to begin at a multiple of their size.
        entries, scales, rest = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        factors = scales.view(torch.float32).repeat_interleave(self.group_columns, -1)[..., : self.quantized]
        numbers = (entries.view(FP8).float() * factors).to(self.dtype)
        return torch.cat((numbers, rest.view(self.dtype)), -1) if others else numbers


def least_powers_of_two(most: Tensor) -> Tensor:
    """Returns for each number of `most` ≥ 0, float32, the least power of two p ≥ 2⁻¹²⁶ with most ≤ 448 · p, float32."""
    # 448 is 1.75 · 2⁸: what is added carries into the exponent exactly where the mantissa is above 1.75.
    exponents = (most.view(torch.int32) + 0x1FFFFF >> 23) - 8
    return (exponents.clamp(min=1) << 23).view(torch.float32)
