"""Layouts that the tests of transfers share: two unlike layer groups, small pages."""

import torch

from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout, LayerGroup
from tandem.cache.plan.spans import Every, Window

PAGE_SIZE = 4


def two_groups(dtype: torch.dtype = torch.float32, scales: KVScales | None = None) -> KVLayout:
    groups = (LayerGroup((0, 2), num_kv_heads=2, head_dim=8), LayerGroup((1,), 1, 4))
    return KVLayout(groups, PAGE_SIZE, dtype, scales)


def latents_beside_kv() -> KVLayout:
    """Entries of two planes in one group, of one plane in the other."""
    groups = (LayerGroup((0, 2), num_kv_heads=2, head_dim=8), LayerGroup((1,), 1, 6, latent_rank=4))
    return KVLayout(groups, PAGE_SIZE, torch.float32)


def entries_beside() -> KVLayout:
    """K and V of 16 bits, and an entry of one plane for 2 positions, whose element type and pages are others."""
    entries = LayerGroup((2,), 1, 6, Every(2), beside=True, num_planes=1, dtype=torch.float32)
    return KVLayout((LayerGroup((0, 1, 2), 2, 8), entries), PAGE_SIZE, torch.bfloat16)


def compressed() -> KVLayout:
    """As of a model that compresses: a window of K = V, what is compressed of 2 and of 8 positions, and what the former
    is made of."""
    groups = (
        LayerGroup((0, 1), 2, 8, Window(6)),
        LayerGroup((0,), 1, 6, Every(2), beside=True, num_planes=1, dtype=torch.float32),
        LayerGroup((1,), 1, 6, Every(8), beside=True, num_planes=1, dtype=torch.float32),
        LayerGroup((0,), 1, 4, Window(4), beside=True, dtype=torch.float16),
    )
    return KVLayout(groups, PAGE_SIZE, torch.bfloat16)
