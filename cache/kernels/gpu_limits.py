"""The limits that kernels for 16 bits on a GPU, FlashInfer's or Triton's, set to a layer group. Importing this needs no
GPU."""

import torch

from tandem.cache.kernels.base import GPU_HEAD_DIMS
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads

DTYPES = (torch.float16, torch.bfloat16)
PAGE_SIZES = (8, 16, 32, 64)
RANK, ROTATED = 512, 64  # of latents
VALUE_DIMS = {128: 128, 192: 256}  # by key_dim: heads of DeepSeek and of GLM, as FlashInfer expands latents
INDEX_DIM = 128  # of index keys
SHARED_DIMS = (16, 32, 64, 128, 256, 512)  # of K and V in one plane, of compressed entries, and of their index keys

Size = tuple[str, int, tuple[int, ...]]
"""Name, value and accepted values."""


def head_sizes(head_dim: int) -> tuple[Size, ...]:
    return (("head_dim", head_dim, GPU_HEAD_DIMS),)


def latent_sizes(width: int, rank: int, heads: LatentHeads) -> tuple[Size, ...]:
    """width: of an entry. Its first `rank` numbers are the latent."""
    return (
        ("latent_rank", rank, (RANK,)),
        ("the rotated part", width - rank, (ROTATED,)),
        ("key_dim", heads.key_dim, tuple(VALUE_DIMS)),
        ("value_dim", heads.value_dim, (VALUE_DIMS.get(heads.key_dim, 0),)),
    )


def index_sizes(width: int, still: int) -> tuple[Size, ...]:
    """width: of an index key. `still` of its numbers are not rotated."""
    return ("index_head_dim", width, (INDEX_DIM,)), ("the rotated part", width - still, (ROTATED,))


def check_sizes(dtype: torch.dtype, page_size: int, sizes: tuple[Size, ...]) -> None:
    """InvalidArgument unless these kernels serve a group. dtype: of K and V, or of latents."""
    for name, value, accepted in (("dtype", dtype, DTYPES), *sizes, ("page_size", page_size, PAGE_SIZES)):
        if value not in accepted:
            raise InvalidArgument(f"{name} is {value}; on a GPU it must be one of {', '.join(map(str, accepted))}")


def check_shared_dim(name: str, head_dim: int) -> None:
    """InvalidArgument unless the kernels by token take K and V in one plane, or compressed entries, of this size. They
    serve float32, too."""
    if head_dim not in SHARED_DIMS:
        raise InvalidArgument(f"{name} is {head_dim}; on a GPU it must be one of {', '.join(map(str, SHARED_DIMS))}")
