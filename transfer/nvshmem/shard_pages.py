"""Pages for a mapped peer that holds another shard of the model: of each layer and plane, the heads that both hold.

Both pools are [num_pages, layers, planes, num_kv_heads, page_size, head_dim], with unlike heads. All functions queue on
one CUDA stream.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.transfer.copy_plan import CopyPlan
from tandem.transfer.nvshmem.copy_engine import copy_rows
from tandem.transfer.nvshmem.kernels.triton_push import push_heads
from tandem.transfer.page_pool import PagePool
from tandem.transfer.regions import Region

COPY_ENGINE_BYTES = 1 << 40  # of a page, layer and plane, from which copy engines outrun the kernel


def copy_region(source: Tensor, target: Tensor, plan: CopyPlan, region: Region, stream: torch.cuda.Stream) -> None:
    """All of a plan. Its slots must lie inside both pools."""
    _, _, _, _, page_size, head_dim = source.shape
    width = region.num_heads * page_size * head_dim * source.element_size()
    with torch.cuda.stream(stream):
        if plan.num_pages.size and width >= COPY_ENGINE_BYTES and region.num_layers == source.shape[1]:
            _copy_runs(source, target, plan, region, width, stream)
        elif plan.num_pages.size:
            pages = [_pages_of(plan.source_pages, plan.num_pages), _pages_of(plan.target_pages, plan.num_pages)]
            own, peers = upload(pages, source.device)
            push_heads(source, target, own, peers, region)
        if plan.source_slots.size:
            slots = [plan.source_slots.astype(np.int64), plan.target_slots.astype(np.int64)]
            own, peers = upload(slots, source.device)
            PagePool(target).put_slots(peers, PagePool(source).read_slots(own, region), region.reversed)


def _copy_runs(
    source: Tensor, target: Tensor, plan: CopyPlan, region: Region, width: int, stream: torch.cuda.Stream
) -> None:
    sides = []
    for pool, pages, head in (
        (source, plan.source_pages, region.heads.start),
        (target, plan.target_pages, region.peer_heads.start),
    ):
        first = pool.data_ptr() + head * pool.stride(3) * pool.element_size()
        sides.append(pages.astype(np.int64) * (pool.stride(0) * pool.element_size()) + first)
    rows = plan.num_pages * (source.shape[1] * source.shape[2])
    pitches = [pool.stride(2) * pool.element_size() for pool in (target, source)]
    copy_rows(sides[1], sides[0], rows, pitches[0], pitches[1], width, stream.cuda_stream)


def _pages_of(first: Int32Array, counts: Int32Array) -> Int32Array:
    """The pages of runs of counts[i] pages from first[i] on: int32 [sum of counts]."""
    begins = np.cumsum(counts) - counts
    return np.repeat(first - begins, counts).astype(np.int32) + np.arange(counts.sum(), dtype=np.int32)
