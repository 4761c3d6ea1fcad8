"""Layouts that the tests of transfers share: two unlike layer groups, small pages."""

import torch

from tandem.cache.kinds.compressed import Beside
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import Every, Window

PAGE_SIZE = 4


def two_groups(dtype: torch.dtype = torch.float32, scales: KVScales | None = None) -> KVLayout:
    groups = (LayerGroup((0, 2), KV(2, 8)), LayerGroup((1,), KV(1, 4)))
    return KVLayout(groups, PAGE_SIZE, dtype, scales)


def latents_beside_kv() -> KVLayout:
    """Entries of two planes in one group, of one plane in the other."""
    groups = (LayerGroup((0, 2), KV(2, 8)), LayerGroup((1,), Latent(6, 4)))
    return KVLayout(groups, PAGE_SIZE, torch.float32)


def entries_beside() -> KVLayout:
    """K and V of 16 bits, and an entry of one plane for 2 positions, whose element type and pages are others."""
    entries = LayerGroup((2,), Beside(1, 6, Every(2), planes=1, dtype=torch.float32))
    return KVLayout((LayerGroup((0, 1, 2), KV(2, 8)), entries), PAGE_SIZE, torch.bfloat16)


def compressed() -> KVLayout:
    """The layout of a model that compresses: a window of K = V, compressed entries of 2 and of 8 positions, and inputs
    of the former."""
    groups = (
        LayerGroup((0, 1), KV(2, 8, Window(6))),
        LayerGroup((0,), Beside(1, 6, Every(2), planes=1, dtype=torch.float32)),
        LayerGroup((1,), Beside(1, 6, Every(8), planes=1, dtype=torch.float32)),
        LayerGroup((0,), Beside(1, 4, Window(4), dtype=torch.float16)),
    )
    return KVLayout(groups, PAGE_SIZE, torch.bfloat16)
