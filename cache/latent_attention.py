"""One layer group that keeps latents, in a forward."""

from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.group_attention import GroupForward
from tandem.cache.group_table import GroupTable
from tandem.cache.kernels.base import LatentKernels
from tandem.cache.latent import LatentHeads, UpProjections
from tandem.cache.layout import LayerGroup
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
