"""Attention to some keys and to others, made one: lse = log Σ e^lse_i, o = Σ o_i · e^(lse_i - lse)."""

from collections.abc import Sequence

import torch

from tandem.cache.kernels.base import Part
from tandem.cache.plan.errors import InvalidArgument


def merge(parts: Sequence[Part]) -> Part:
    """The attention of the same queries to the keys of all parts, computed in float32 and given in the first's dtype.

    The keys of two parts are apart: one that stands in both counts twice. InvalidArgument for no part, or for parts of
    other shapes.
    """
    if not parts:
        raise InvalidArgument("parts is empty; it must have at least one")
    shape = parts[0].o.shape
    for index, (o, lse) in enumerate(parts):
        if o.shape != shape or lse.shape != shape[:2]:
            raise InvalidArgument(
                f"parts[{index}] has o {tuple(o.shape)} and lse {tuple(lse.shape)}; they must be {tuple(shape)} and "
                f"{tuple(shape[:2])}, as parts[0] has"
            )
    total = torch.stack([lse.float() for _, lse in parts]).logsumexp(0)
    weighted = [o.float() * (lse.float() - total).exp().unsqueeze(-1) for o, lse in parts]
    return Part(torch.stack(weighted).sum(0).to(parts[0].o.dtype), total)
