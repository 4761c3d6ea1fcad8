"""Rounds numbers as storage in 8 bits does, by the definition of e4m3."""

import torch
from torch import Tensor


def e4m3_values() -> Tensor:
    """float64 [127]: what codes 0 … 126 of float8_e4m3fn mean, by its definition; 128 … 254 are their negatives."""
    codes = torch.arange(127)
    exponent, mantissa = (codes >> 3).double(), (codes & 7).double() / 8
    return torch.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))


def round_by(x: Tensor, scales: tuple[float, ...]) -> Tensor:
    """x [n, heads, dim] through entries: x / scale to the nearest value there is, the even code of two, times scale."""
    scale = torch.tensor(scales, dtype=torch.float32).double()[:, None]
    values = e4m3_values()
    magnitude = (x / scale).abs().contiguous()
    above = torch.searchsorted(values, magnitude).clamp(1, 126)
    below = above - 1
    up, down = values[above] - magnitude, magnitude - values[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return values[nearest].copysign(x) * scale


def round_rows(x: Tensor, quantized: int) -> Tensor:
    """x [..., dim], float64, whose first `quantized` numbers go through entries, 128 by one scale: of the powers of two
    from 2⁻¹²⁶ on the least that leaves none above 448."""
    powers = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    groups = []
    for group in x[..., :quantized].split(128, -1):
        rows = group.flatten(0, -2)
        fits = rows.abs().amax(1, keepdim=True) <= 448 * powers
        scales = powers[fits.int().argmax(1)]
        groups.append((round_by((rows / scales[:, None])[:, None], (1.0,))[:, 0] * scales[:, None]).view(group.shape))
    return torch.cat((*groups, x[..., quantized:]), -1)
