"""Layouts that the tests of transfers share: two unlike layer groups, small pages."""

import torch

from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout, LayerGroup

PAGE_SIZE = 4


def two_groups(dtype: torch.dtype = torch.float32, scales: KVScales | None = None) -> KVLayout:
    groups = (LayerGroup((0, 2), num_kv_heads=2, head_dim=8), LayerGroup((1,), 1, 4))
    return KVLayout(groups, PAGE_SIZE, dtype, scales)


def latents_beside_kv() -> KVLayout:
    """Entries of two planes in one group, of one plane in the other."""
    groups = (LayerGroup((0, 2), num_kv_heads=2, head_dim=8), LayerGroup((1,), 1, 6, latent_rank=4))
    return KVLayout(groups, PAGE_SIZE, torch.float32)
