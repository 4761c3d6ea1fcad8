"""What the layers of one group take in a forward, checked before a kernel sees it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads, UpProjections


@dataclass(frozen=True)
class AttentionInputs:
    """Of a group with K and V. dtype: of q, k and v. device: where they, and sinks, are."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def check(self, num_tokens: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
        """InvalidArgument unless these are Attention.attend's for num_tokens tokens."""
        self.check_query(num_tokens, q, sinks)
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x, (num_tokens, self.num_kv_heads, self.head_dim), self.dtype, self.device)

    def check_query(self, num_tokens: int, q: Tensor, sinks: Tensor | None) -> None:
        """InvalidArgument unless these are Attention.read's for num_tokens tokens."""
        num_q_heads = q.shape[1] if q is not None and q.dim() == 3 else self.num_kv_heads
        check_tensor("q", q, (num_tokens, num_q_heads, self.head_dim), self.dtype, self.device)
        if num_q_heads < 1 or num_q_heads % self.num_kv_heads:
            raise InvalidArgument(f"q has {num_q_heads} heads; a multiple of {self.num_kv_heads} is accepted")
        if sinks is None:
            return
        if sinks.shape != (num_q_heads,) or not sinks.is_floating_point() or sinks.device != self.device:
            raise InvalidArgument(
                f"sinks is {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}; {(num_q_heads,)} of a floating "
                f"dtype on {self.device} is accepted"
            )


@dataclass(frozen=True)
class LatentInputs:
    """Of a group with latents of `rank` numbers and keys of `rotated`. dtype and device: of all tensors."""

    heads: LatentHeads
    rank: int
    rotated: int
    dtype: torch.dtype
    device: torch.device

    def check(self, num_tokens: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections) -> None:
        """InvalidArgument unless these are Attention.attend_latents' for num_tokens tokens."""
        heads, num_heads = self.heads, up.weight.shape[0]
        if up.heads != heads:
            raise InvalidArgument(f"up.heads is {up.heads}; {heads} is accepted")
        for name, x, shape in (
            ("q", q, (num_tokens, num_heads, heads.key_dim + self.rotated)),
            ("latents", latents, (num_tokens, self.rank)),
            ("keys", keys, (num_tokens, self.rotated)),
            ("up.weight", up.weight, (num_heads, heads.key_dim + heads.value_dim, self.rank)),
        ):
            check_tensor(name, x, shape, self.dtype, self.device)


@dataclass(frozen=True)
class IndexInputs:
    """Of a group with index keys, of which `still` numbers are not rotated. dtype: of all but the weights."""

    still: int
    rotated: int
    dtype: torch.dtype
    device: torch.device

    def check(self, num_tokens: int, q: Tensor, still: Tensor, rotated: Tensor, weights: Tensor) -> None:
        """InvalidArgument unless these are those of an Index for num_tokens tokens."""
        num_heads = q.shape[1] if q.dim() == 3 else 1
        for name, x, shape, dtype in (
            ("index.q", q, (num_tokens, num_heads, self.still + self.rotated), self.dtype),
            ("index.still", still, (num_tokens, self.still), self.dtype),
            ("index.rotated", rotated, (num_tokens, self.rotated), self.dtype),
            ("index.weights", weights, (num_tokens, num_heads), torch.float32),
        ):
            check_tensor(name, x, shape, dtype, self.device)


@dataclass(frozen=True)
class EntryInputs:
    """Of a group that stands beside others, whose entries have one plane or two."""

    planes: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def check(self, num_entries: int, k: Tensor, v: Tensor | None) -> None:
        """InvalidArgument unless these are Attention.store's for num_entries new entries."""
        if self.planes == 1 and v is not None:
            raise InvalidArgument("v is given, but entries have one plane; None is accepted")
        for name, x in (("k", k), ("v", v))[: self.planes]:
            check_tensor(name, x, (num_entries, self.num_heads, self.head_dim), self.dtype, self.device)


@dataclass(frozen=True)
class SharedInputs:
    """Of a group whose K and V are the same numbers of one head. dtype: of q and kv."""

    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def check(self, num_tokens: int, q: Tensor, kv: Tensor, sinks: Tensor) -> None:
        """InvalidArgument unless these are Attention.attend_shared's for num_tokens tokens."""
        num_heads = q.shape[1] if q.dim() == 3 else 1
        for name, x, shape, dtype in (
            ("q", q, (num_tokens, num_heads, self.head_dim), self.dtype),
            ("kv", kv, (num_tokens, 1, self.head_dim), self.dtype),
            ("sinks", sinks, (num_heads,), sinks.dtype),
        ):
            check_tensor(name, x, shape, dtype, self.device)


def check_tensor(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """InvalidArgument, which calls x `name`, unless it is that, with a last stride of 1."""
    if x is None:
        raise InvalidArgument(f"{name} is None; {shape} of {dtype} on {device} is accepted")
    if x.shape != shape or x.dtype is not dtype or x.device != device or x.stride(-1) != 1:
        raise InvalidArgument(
            f"{name} is {tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}; {shape} of {dtype} on "
            f"{device} with a last stride of 1 is accepted"
        )
