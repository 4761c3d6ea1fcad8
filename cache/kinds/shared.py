"""K and V that are the same numbers of one head (DeepSeek-V4), stored once."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cache.kernels.base import AttentionBackend, SharedKV
from tandem.cache.kernels.gpu_limits import check_shared_dim
from tandem.cache.kernels.torch.compressed import TorchSharedKernels
from tandem.cache.kinds.compressed import Beside, compresses
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import Span


@dataclass(frozen=True)
class Shared(ServedKind):
    """One plane of one head, in a window. Groups next to it keep compressed KV: see CompressedGroups."""

    head_dim: int
    keeps: Span

    num_kv_heads = 1
    whole_on_ranks = True
    planes = 1
    takes = SharedKV
    serves = "attend_shared"
    holds = "K and V in one plane"
    needs_call = True
    by_token = True
    no_scales = "entries beside others, or with one plane; scales must be None"
    no_sliding = "K and V in one plane"

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        super().check(index, groups, page_size)
        if self.keeps.window is None:
            raise InvalidArgument(
                f"keeps of group {index} is {self.keeps}, with K and V in one plane; it must be a window"
            )
        for layer in groups[index].layers:
            own = [group.kind for group in groups if layer in group.layers and isinstance(group.kind, Beside)]
            if own and not compresses(own, self.head_dim):
                raise InvalidArgument(
                    f"layer {layer}, of K and V in one plane, has groups beside it that keep "
                    f"{[str(kind.keeps) for kind in own]}; one must keep an entry for several positions, with a "
                    "window of one or two entries for what these are made of"
                )

    def backend(self, site: Site) -> AttentionBackend[SharedKV]:
        assert self.keeps.window is not None  # check() has seen to it
        return TorchSharedKernels(site.pool, site.heads.scale_of(self.head_dim), self.keeps.window)

    def check_inputs(self, num_tokens: int, x: SharedKV, site: Site) -> None:
        num_heads = x.q.shape[1] if x.q.dim() == 3 else 1
        for name, tensor, shape, dtype in (
            ("q", x.q, (num_tokens, num_heads, self.head_dim), site.dtype),
            ("kv", x.kv, (num_tokens, 1, self.head_dim), site.dtype),
            ("sinks", x.sinks, (num_heads,), x.sinks.dtype),
        ):
            check_tensor(name, tensor, shape, dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        check_shared_dim("head_dim", self.head_dim)
