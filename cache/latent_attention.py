"""One layer group that keeps latents, in a forward."""

from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.group_attention import GroupForward
from tandem.cache.group_table import GroupTable
from tandem.cache.kernels.base import LatentKernelFactory, LatentKernels
from tandem.cache.latent import LatentHeads, UpProjections
from tandem.cache.layout import KVLayout, LayerGroup
from tandem.cache.page_writer import PageWriter
from tandem.cache.plan import GroupPlan


class LatentGroupAttention(GroupForward):
    """heads read the latents of `members`, which is group `group` of its layout."""

    kernels: LatentKernels

    def __init__(
        self,
        group: int,
        members: LayerGroup,
        heads: LatentHeads,
        kernels: LatentKernels,
        table: GroupTable,
        writer: PageWriter | None,
        page_size: int,
    ) -> None:
        super().__init__(group, kernels, None, table, writer, page_size)
        assert members.latent_rank is not None  # else the group had no latents
        self._rank, self._rotated = members.latent_rank, members.head_dim - members.latent_rank
        self._heads = heads

    def attend(
        self, plan: GroupPlan, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections
    ) -> Tensor:
        """See PagedKVCache.latent_attention; layer counts within the group."""
        self._check(q, latents, keys, up)
        q, entries = self.kernels.append(layer, q, latents, keys, plan.rotation, plan.kernel_plan)
        self.push(plan, layer, entries, None)
        return self.kernels.attend(layer, q, plan.kernel_plan, up)

    def _check(self, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections) -> None:
        (tokens, num_heads, _), heads = q.shape, self._heads
        for name, shape, accepted in (
            ("q", q.shape, (tokens, num_heads, heads.key_dim + self._rotated)),
            ("latents", latents.shape, (tokens, self._rank)),
            ("keys", keys.shape, (tokens, self._rotated)),
            ("up.weight", up.weight.shape, (num_heads, heads.key_dim + heads.value_dim, self._rank)),
        ):
            if shape != accepted:
                raise InvalidArgument(f"{name} is {tuple(shape)}; {accepted} is accepted")


def make_latent_kernels(
    members: LayerGroup, heads: LatentHeads, pool: Tensor, scale: float | None, factory: LatentKernelFactory
) -> LatentKernels:
    """Kernels of a group with latents. scale None: that of the width of q, ** -0.5."""
    rank = members.latent_rank
    assert rank is not None  # else the group had no latents
    width = heads.key_dim + members.head_dim - rank
    return factory(pool, width**-0.5 if scale is None else scale, rank, heads)


def check_latents(layout: KVLayout, heads: LatentHeads | None, softcap: float | None) -> None:
    """InvalidArgument unless a cache of `layout` can be made with these."""
    if layout.has_latents != (heads is not None):
        raise InvalidArgument(f"latent is {heads}; it must be given exactly when the layout has groups with latents")
    if heads is not None and min(heads.key_dim, heads.value_dim) < 1:
        raise InvalidArgument(f"latent is {heads}; both sizes must be at least 1")
    if heads is not None and softcap is not None:
        raise InvalidArgument(f"softcap is {softcap}; with latents it must be None")
