"""Index keys next to the latents of the same layers (DeepSeek-V3.2): a query attends to the positions that it scores
highest by them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.kernels.base import Index, IndexBackend, Latents
from tandem.cache.kernels.gpu_limits import check_sizes, index_sizes
from tandem.cache.kernels.torch.index import TorchIndexKernels
from tandem.cache.kinds.kind import ServedKind, Site, kind_of
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL


@dataclass(frozen=True)
class IndexKeys(ServedKind):
    """One plane of one head: `still` numbers, then those that RoPE rotates. A query attends to the top_k positions."""

    head_dim: int
    still: int
    top_k: int

    num_kv_heads = 1
    keeps = ALL
    planes = 1
    attended = False
    takes = Index
    serves = "attend_latents"
    holds = "index keys"
    of_latents = True
    whole_on_ranks = True
    no_sliding = "index keys"

    @property
    def rotated(self) -> int:
        return self.head_dim - self.still

    def fp8_rows(self, dtype: torch.dtype) -> Fp8Rows:
        return Fp8Rows(self.head_dim, self.head_dim, dtype)

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        """Index keys serve some layers of one group with latents, the first among them; none is served twice."""
        super().check(index, groups, page_size)
        if not 1 <= integer(f"still of group {index}", self.still) < self.head_dim:
            raise InvalidArgument(f"group {index} has still {self.still}; it must be from 1 to {self.head_dim - 1}")
        integer(f"top_k of group {index}", self.top_k, least=1)
        layers = groups[index].layers
        served = next((of for of in groups if kind_of(of).takes is Latents and {*layers} <= {*of.layers}), None)
        others = [of for of in groups[:index] if isinstance(of.kind, IndexKeys)]
        alone = served is not None and not any({*of.layers} & {*served.layers} for of in others)
        if not layers or not alone or served is None or min(served.layers) not in layers:
            raise InvalidArgument(
                f"group {index} has index keys of layers {list(layers)}; it must have layers of one group with "
                "latents, the first of these among them, and be alone in that"
            )

    def backend(self, site: Site) -> IndexBackend:
        """Triton's for 16 bits on a GPU, else torch's. InvalidArgument for sizes that were not tried there."""
        if site.device.type == "cuda" and site.dtype != torch.float32:
            from tandem.cache.kernels.triton.index import TritonIndexKernels

            self.check_gpu(site.index, site.layout, None)
            return TritonIndexKernels(site.pool, self.still, self.top_k, site.rows)
        return TorchIndexKernels(site.pool, self.still, self.top_k, site.rows)

    def check_inputs(self, num_tokens: int, x: Index, site: Site) -> None:
        num_heads = x.q.shape[1] if x.q.dim() == 3 else 1
        for name, tensor, shape, dtype in (
            ("index.q", x.q, (num_tokens, num_heads, self.head_dim), site.dtype),
            ("index.still", x.still, (num_tokens, self.still), site.dtype),
            ("index.rotated", x.rotated, (num_tokens, self.rotated), site.dtype),
            ("index.weights", x.weights, (num_tokens, num_heads), torch.float32),
        ):
            check_tensor(name, tensor, shape, dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        if layout.dtype != torch.float32:
            check_sizes(layout.dtype, layout.page_size, index_sizes(self.head_dim, self.still))


def index_keys(layout: KVLayout) -> dict[int, tuple[int, int]]:
    """Returns for each layer with index keys, in order, their group and the layer's index there."""
    return layout.index_of(lambda kind: isinstance(kind, IndexKeys))


def top_k_beside(layout: KVLayout, group: int) -> int | None:
    """How many positions a query of a group with latents attends to at most; None: to all."""
    layers = {*layout.groups[group].layers}
    beside = (of.kind for of in layout.groups if {*of.layers} <= layers)
    return next((kind.top_k for kind in beside if isinstance(kind, IndexKeys)), None)
