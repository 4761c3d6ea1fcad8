"""The state of a recurrent layer: one entry a sequence, of the same size however long that is."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from tandem.cache.kernels.base import AttentionBackend
from tandem.cache.kernels.recurrent import KdaShape, RecurrentInputs, StateShape
from tandem.cache.kernels.torch.recurrent import TorchStateKernels
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import HeldNumbers, Shard
from tandem.cache.plan.spans import LAST

MAY_BE_NONE = tuple(RecurrentInputs._field_defaults)
MOST_GPU_DIM = 128  # a program of Triton's kernels has a head's keys and values of a chunk in registers


@dataclass(frozen=True)
class Recurrent(ServedKind):
    """One plane of one head, float32: the tail of a causal convolution, then the state. Tokens change it by the
    rule of its shape. A rank has the shape of its own heads. sharers: see StateShape.sharers."""

    shape: StateShape
    sharers: int = 1

    num_kv_heads = 1
    keeps = LAST
    planes = 1
    dtype = torch.float32
    takes = RecurrentInputs
    serves = "recur"
    holds = "a state"
    no_scales = "states; only K and V have 8 bits"
    no_sliding = "states"

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.shape.numbers

    def held(self, shard: Shard) -> tuple[HeldNumbers, ...]:
        return tuple(self.shape.held_of_entry(shard, self.sharers))

    def whole(self, shard: Shard) -> "Recurrent":
        return Recurrent(self.shape.undivided(shard, self.sharers))

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        """Checks that other groups come first, and keep no encoder's entries."""
        sizes = asdict(self.shape)
        for name, value in sizes.items():
            integer(f"{name} of group {index}", value, least=1)
        divisor, divided = self.shape.divisor
        if sizes[divided] % sizes[divisor]:
            raise InvalidArgument(
                f"{divided} of group {index} is {sizes[divided]}; it must be a multiple of {divisor}, {sizes[divisor]}"
            )
        if groups[0].keeps.last or any(group.keeps.given for group in groups):
            raise InvalidArgument(
                f"group {index} keeps states; the first group must have an entry for each position, and no group an "
                "encoder's entries"
            )
        super().check(index, groups, page_size)

    def check_rope(self, rotary_dim: int) -> None:
        """Accepts any RoPE: nothing is rotated."""

    def backend(self, site: Site) -> AttentionBackend[RecurrentInputs]:
        if site.device.type != "cuda":
            return TorchStateKernels(site.pool, self.shape)
        self.check_gpu(site.index, site.layout, None)
        from tandem.cache.kernels.delta.kernels import TritonDeltaKernels  # triton may be missing elsewhere

        return TritonDeltaKernels(site.pool, self.shape)

    def check_inputs(self, num_tokens: int, x: RecurrentInputs, site: Site) -> None:
        heads, decays, channels = (num_tokens, self.shape.heads), (num_tokens, *self.shape.decays), self.shape.channels
        for name, tensor, shape, dtype in (
            ("mixed", x.mixed, (num_tokens, channels), site.dtype),
            ("conv", x.conv, (channels, self.shape.tail + 1), site.dtype),
            ("log_decay", x.log_decay, decays, torch.float32),
            ("strength", x.strength, heads, torch.float32),
            ("conv_bias", x.conv_bias, (channels,), site.dtype),
            ("skip", x.skip, (self.shape.heads,), torch.float32),
        ):
            if tensor is not None or name not in MAY_BE_NONE:
                check_tensor(name, tensor, shape, dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        sizes = asdict(self.shape)
        for name in self.shape.sides:
            if sizes[name] > MOST_GPU_DIM:
                raise InvalidArgument(
                    f"{name} of group {index} is {sizes[name]}; on a GPU it must be at most {MOST_GPU_DIM}"
                )
        if isinstance(self.shape, KdaShape) and self.shape.key_heads != self.shape.value_heads:
            raise InvalidArgument(
                f"key_heads of group {index} is {self.shape.key_heads}; on a GPU it must be value_heads, "
                f"{self.shape.value_heads}, where rows of states decay by themselves"
            )
