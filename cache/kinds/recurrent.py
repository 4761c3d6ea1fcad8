"""The state of a recurrent layer (Qwen3-Next): one entry a sequence, of the same size however long that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.kernels.base import AttentionBackend
from tandem.cache.kernels.recurrent import DeltaInputs, DeltaShape
from tandem.cache.kernels.torch.recurrent import TorchDeltaKernels
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import LAST


@dataclass(frozen=True)
class Recurrent(ServedKind):
    """One plane of one head, float32: the tail of a causal convolution, then the state of a gated delta rule."""

    shape: DeltaShape

    num_kv_heads = 1
    keeps = LAST
    planes = 1
    dtype = torch.float32
    takes = DeltaInputs
    serves = "recur"
    holds = "a state"
    whole_on_ranks = True
    no_scales = "states; only K and V have 8 bits"
    no_sliding = "states"

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.shape.numbers

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        """Other groups come first, and keep no encoder's entries."""
        for name, value in self.shape._asdict().items():
            integer(f"{name} of group {index}", value, least=1)
        if self.shape.value_heads % self.shape.key_heads:
            raise InvalidArgument(
                f"value_heads of group {index} is {self.shape.value_heads}; a multiple of key_heads, "
                f"{self.shape.key_heads}, is accepted"
            )
        if groups[0].keeps.last or any(group.keeps.given for group in groups):
            raise InvalidArgument(
                f"group {index} keeps states; a first group with an entry for each position is accepted, and none with "
                "an encoder's entries"
            )
        super().check(index, groups, page_size)

    def check_rope(self, rotary_dim: int) -> None:
        """Nothing is rotated."""

    def backend(self, site: Site) -> AttentionBackend[DeltaInputs]:
        if site.device.type != "cpu":
            self.check_gpu(site.index, site.layout, None)
        return TorchDeltaKernels(site.pool, self.shape)

    def check_inputs(self, num_tokens: int, x: DeltaInputs, site: Site) -> None:
        heads, channels = (num_tokens, self.shape.value_heads), self.shape.channels
        for name, tensor, shape, dtype in (
            ("mixed", x.mixed, (num_tokens, channels), site.dtype),
            ("conv", x.conv, (channels, self.shape.tail + 1), site.dtype),
            ("log_decay", x.log_decay, heads, torch.float32),
            ("beta", x.beta, heads, site.dtype),
        ):
            check_tensor(name, tensor, shape, dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        raise InvalidArgument(
            f"layers {list(layout.groups[index].layers)} keep recurrent states, and kernels on a GPU serve none yet; "
            "the device cpu is accepted"
        )
