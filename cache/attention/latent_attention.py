"""One layer group that keeps latents, in a forward."""

import torch
from torch import Tensor

from tandem.cache.attention.forward_plan import GroupPlan
from tandem.cache.attention.group_attention import GroupForward
from tandem.cache.kernels.base import LatentKernels
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.attention_inputs import check_tensor
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import LayerGroup
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import StoredLayers


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
        dtype: torch.dtype,
        device: torch.device,
        stored: StoredLayers | None,
    ) -> None:
        super().__init__(group, kernels, None, table, writer, page_size, stored)
        assert members.latent_rank is not None  # else the group had no latents
        self._rank, self._rotated = members.latent_rank, members.head_dim - members.latent_rank
        self._heads = heads
        self._dtype, self._device = dtype, device

    def attend(
        self, plan: GroupPlan, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections
    ) -> Tensor:
        """See PagedKVCache.latent_attention; layer counts within the group."""
        self._check(plan.tables.slot_mapping.size, q, latents, keys, up)
        q, entries = self.kernels.append(layer, q, latents, keys, plan.rotation, plan.kernel_plan)
        self.push(plan, layer, entries, None)
        return self.kernels.attend(layer, q, plan.kernel_plan, up)

    def _check(self, tokens: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections) -> None:
        heads, num_heads = self._heads, up.weight.shape[0]
        if up.heads != heads:
            raise InvalidArgument(f"up.heads is {up.heads}; {heads} is accepted")
        for name, x, shape in (
            ("q", q, (tokens, num_heads, heads.key_dim + self._rotated)),
            ("latents", latents, (tokens, self._rank)),
            ("keys", keys, (tokens, self._rotated)),
            ("up.weight", up.weight, (num_heads, heads.key_dim + heads.value_dim, self._rank)),
        ):
            check_tensor(name, x, shape, self._dtype, self._device)
