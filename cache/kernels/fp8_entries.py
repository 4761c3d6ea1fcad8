"""K and V of one layer group as 8-bit entries and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.plan.kv_scales import FP8, FP8_MAX
from tandem.cache.plan.layout import KVLayout


@dataclass(frozen=True, eq=False)
class Fp8Entries:
    """entry = float8_e4m3fn(K / scale), saturated; K ≈ entry · scale; V alike, by scales of its own.

    dtype: of q, k and v. scales, inverse: float32 [layers, 2, num_kv_heads], on the pool's device, K's at 0 and V's at
    1; layer counts within the group. of_all_heads: per layer the scales of K and V where all heads have the same.
    """

    dtype: torch.dtype
    scales: Tensor
    inverse: Tensor
    of_all_heads: tuple[tuple[float, float] | None, ...]

    @classmethod
    def of_group(cls, layout: KVLayout, group: int, device: torch.device) -> "Fp8Entries | None":
        """Makes the entries of a group; None where a layout stores K and V as they are."""
        if layout.scales is None:
            return None
        members, given = layout.groups[group], layout.scales
        pairs = [(given.k[layer], given.v[layer]) for layer in members.layers]
        scales = torch.tensor([[_of_heads(scales, members.num_kv_heads) for scales in pair] for pair in pairs])
        of_all_heads = tuple((k[0], v[0]) if len({*k}) == len({*v}) == 1 else None for k, v in pairs)
        return cls(layout.dtype, scales.to(device), scales.reciprocal().to(device), of_all_heads)

    def quantise(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Entries, float8_e4m3fn, of k and v [n, num_kv_heads, head_dim]."""
        k_factors, v_factors = self.inverse[layer].unsqueeze(-1)
        # Clamped first: conversion alone makes NaN of what is too large, in some versions of torch.
        return (
            (k.float() * k_factors).clamp_(-FP8_MAX, FP8_MAX).to(FP8),
            (v.float() * v_factors).clamp_(-FP8_MAX, FP8_MAX).to(FP8),
        )

    def dequantise(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v of entries [n, num_kv_heads, head_dim]."""
        k_factors, v_factors = self.scales[layer].unsqueeze(-1)
        return (k.float() * k_factors).to(self.dtype), (v.float() * v_factors).to(self.dtype)

    def scale_queries(self, layer: int, q: Tensor) -> Tensor:
        """Scales q [T, num_q_heads, head_dim] so that its products with stored entries equal the products of q with
        K."""
        return self._scaled(layer, 0, q)

    def scale_output(self, layer: int, o: Tensor) -> Tensor:
        """o [T, num_q_heads, head_dim] over V, of that over entries of V."""
        return self._scaled(layer, 1, o)

    def _scaled(self, layer: int, which: int, x: Tensor) -> Tensor:
        scales = self.scales[layer, which].view(-1, 1, 1)
        by_kv_head = x.unflatten(1, (scales.shape[0], -1))
        # Multiplied in float32: a scale that is rounded first would be wrong in the same way everywhere.
        return torch.mul(by_kv_head, scales, out=torch.empty_like(by_kv_head)).view(x.shape)


def _of_heads(scales: tuple[float, ...], num_kv_heads: int) -> tuple[float, ...]:
    return scales * num_kv_heads if len(scales) == 1 else scales
