"""How kernels that gather entries, which all heads read, divide work into programs."""

from typing import NamedTuple

from torch import Tensor

MANY_TOKENS = 8
MOST_BYTES = 1024  # of an entry: more do not fit on a multiprocessor


class EntryTiling(NamedTuple):
    """Work of a kernel's programs. Programs with more heads read less in all. With fewer heads there are more programs,
    so that few tokens keep a GPU busy."""

    heads: int  # of a program
    entries: int  # read at once
    warps: int
    stages: int
    programs: int  # fewer than these share out what a token reads


FEW = EntryTiling(heads=16, entries=32, warps=4, stages=2, programs=256)


def choose_tiling(q: Tensor, many: EntryTiling) -> EntryTiling:
    """FEW, or `many` for queries [T, num_heads, D] of many tokens, which are narrow enough and have heads for it."""
    num_tokens, num_heads, size = q.shape
    fits = size * q.element_size() <= MOST_BYTES and num_heads % many.heads == 0
    return many if fits and num_tokens >= MANY_TOKENS else FEW
