"""The scales of a cache that stores K and V in 8 bits, as checkpoints carry them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.plan.arrays import check_factor
from tandem.cache.plan.errors import InvalidArgument

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class KVScales:
    """What stored entries (float8_e4m3fn) are multiplied with to give K and V.

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
                        f"scales.{name} has {len(of_layer)} numbers for layer {layer}; {accepted} are accepted"
                    )
                for scale in of_layer:
                    check_factor(f"scales.{name} of layer {layer}", scale)
