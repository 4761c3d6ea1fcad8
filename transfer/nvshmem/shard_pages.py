"""Pages for a mapped peer that holds another shard of the model: of each layer and plane, the heads that both hold.

Both pools are [num_pages, layers, planes, num_kv_heads, page_size, head_dim], with unlike heads. A kernel stores whole
pages: copy engines take such rows of 16 KiB at half the link's rate. Entries of states have other parts in common.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.transfer.copy_plan import CopyPlan
from tandem.transfer.nvshmem.kernels.triton_push import push_heads
from tandem.transfer.page_pool import PagePool
from tandem.transfer.regions import ALL_OF_THEM, Region


def copy_region(source: Tensor, target: Tensor, plan: CopyPlan, region: Region, stream: torch.cuda.Stream) -> None:
    """All of a plan, queued on the stream. Its slots must lie inside both pools."""
    with torch.cuda.stream(stream):
        if region.numbers != (ALL_OF_THEM,):  # of states, whose numbers ranks divide
            PagePool(target).copy(PagePool(source), plan, region)
            return
        if plan.num_pages.size:
            pages = [_pages_of(plan.source_pages, plan.num_pages), _pages_of(plan.target_pages, plan.num_pages)]
            own, peers = upload(pages, source.device)
            push_heads(source, target, own, peers, region)
        if plan.source_slots.size:
            slots = [plan.source_slots.astype(np.int64), plan.target_slots.astype(np.int64)]
            own, peers = upload(slots, source.device)
            PagePool(target).put_slots(peers, PagePool(source).read_slots(own, region), region.reversed)


def _pages_of(first: Int32Array, counts: Int32Array) -> Int32Array:
    """The pages of runs of counts[i] pages from first[i] on: int32 [sum of counts]."""
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts).astype(np.int32) + np.arange(counts.sum(), dtype=np.int32)
