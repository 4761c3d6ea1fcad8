"""What the kernels that serve 16 bits on a GPU, FlashInfer's or Triton's, take of a layer group. Importing this needs
no GPU."""

import torch

from tandem.cache.kernels.base import GPU_HEAD_DIMS
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout

DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = (8, 16, 32, 64)
RANK, ROTATED = 512, 64  # of latents
VALUE_DIMS = {128: 128, 192: 256}  # by key_dim: heads of DeepSeek and of GLM, as FlashInfer expands latents
INDEX_DIM = 128  # of index keys
SHARED_DIMS = (16, 32, 64, 128, 256, 512)  # of K and V in one plane, of compressed entries, and of their index keys

Size = tuple[str, int, tuple[int, ...]]
"""Name, value and what is accepted."""


def head_sizes(head_dim: int) -> tuple[Size, ...]:
    return (("head_dim", head_dim, GPU_HEAD_DIMS),)


def latent_sizes(width: int, rank: int, heads: LatentHeads) -> tuple[Size, ...]:
    """width: of an entry, of which rank numbers are the latent."""
    return (
        ("latent_rank", rank, (RANK,)),
        ("the rotated part", width - rank, (ROTATED,)),
        ("key_dim", heads.key_dim, tuple(VALUE_DIMS)),
        ("value_dim", heads.value_dim, (VALUE_DIMS.get(heads.key_dim, 0),)),
    )


def index_sizes(width: int, still: int) -> tuple[Size, ...]:
    """width: of an index key, of which `still` numbers are not rotated."""
    return ("index_head_dim", width, (INDEX_DIM,)), ("the rotated part", width - still, (ROTATED,))


def check_sizes(dtype: torch.dtype, page_size: int, sizes: tuple[Size, ...]) -> None:
    """InvalidArgument unless these kernels serve a group. dtype: of K and V, or of latents."""
    for name, value, accepted in (("dtype", dtype, DTYPES), *sizes, ("page_size", page_size, PAGE_SIZES)):
        if value not in accepted:
            raise InvalidArgument(f"{name} is {value}; on a GPU it must be one of {', '.join(map(str, accepted))}")


def check_layout(layout: KVLayout, heads: LatentHeads | None) -> None:
    """InvalidArgument unless kernels on a GPU serve all groups of a layout. Float32 is torch's, which takes
    all but K and V in one plane.

    heads: of the groups with latents.
    """
    _check_shared(layout)
    if layout.dtype == torch.float32:
        return
    for group in layout.groups:
        if group.beside or group.shares_planes:
            continue
        sizes = head_sizes(group.head_dim)
        if group.latent_rank is not None and group.top_k is not None:
            sizes = index_sizes(group.head_dim, group.latent_rank)
        elif group.latent_rank is not None and heads is not None:
            sizes = latent_sizes(group.head_dim, group.latent_rank, heads)
        check_sizes(layout.dtype, layout.page_size, sizes)


def _check_shared(layout: KVLayout) -> None:
    """Entries beside others that nobody compresses are torch's, which takes all."""
    made = {group for of in layout.compressed.values() for group in (of.entries, of.keys) if group is not None}
    for index, group in enumerate(layout.groups):
        if (group.shares_planes or index in made) and group.head_dim not in SHARED_DIMS:
            name = "index_head_dim" if group.top_k is not None else "head_dim"
            raise InvalidArgument(
                f"{name} is {group.head_dim}; on a GPU it must be one of {', '.join(map(str, SHARED_DIMS))}"
            )
