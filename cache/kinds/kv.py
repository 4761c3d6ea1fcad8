"""K and V of each KV head, apart: full attention, windows and chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.cache.kernels.base import QKV, KVBackend, Query
from tandem.cache.kernels.gpu_limits import check_sizes, head_sizes
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL, Span


@dataclass(frozen=True)
class KV(ServedKind):
    """Two planes: K, rotated, and V."""

    num_kv_heads: int
    head_dim: int
    keeps: Span = ALL
    replicas: int = field(default=1, kw_only=True)

    takes = QKV
    serves = "attend"
    holds = "K and V"
    readable = True

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        super().check(index, groups, page_size)
        if self.keeps.given and type(self) is KV:
            raise InvalidArgument(f"keeps of group {index} is {self.keeps}; GivenKV keeps an encoder's entries")

    def backend(self, site: Site) -> KVBackend:
        scoring = Scoring(site.heads.scale_of(self.head_dim), self.keeps.window, site.heads.softcap)
        return site.kernels(site.pool, scoring, site.fp8)

    def check_inputs(self, num_tokens: int, x: QKV, site: Site) -> None:
        self.check_query(num_tokens, x, site)
        shape = (num_tokens, self.num_kv_heads, self.head_dim)
        check_tensor("k", x.k, shape, site.dtype, site.device)
        check_tensor("v", x.v, shape, site.dtype, site.device)

    def check_query(self, num_tokens: int, x: Query | QKV, site: Site) -> None:
        q, sinks = x.q, x.sinks
        num_q_heads = q.shape[1] if q is not None and q.dim() == 3 else self.num_kv_heads
        check_tensor("q", q, (num_tokens, num_q_heads, self.head_dim), site.dtype, site.device)
        if num_q_heads < 1 or num_q_heads % self.num_kv_heads:
            raise InvalidArgument(f"q has {num_q_heads} heads; it must have a multiple of {self.num_kv_heads}")
        if sinks is None:
            return
        if sinks.shape != (num_q_heads,) or not sinks.is_floating_point() or sinks.device != site.device:
            raise InvalidArgument(
                f"sinks is {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}; it must be {(num_q_heads,)} of a "
                f"floating dtype on {site.device}"
            )

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        if layout.dtype != torch.float32:  # that is torch's, which takes all sizes
            check_sizes(layout.dtype, layout.page_size, head_sizes(self.head_dim))
