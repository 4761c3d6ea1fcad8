"""The rules by which layers attend to a kind of state.

A new kind is a file here, with its kernels, and a layout's groups name it. CONTRIBUTING.md has the steps.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.cache.kernels.base import AttentionBackend, KernelFactory, Query
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kinds.heads import Heads
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import Kind, LayerGroup
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout


@dataclass(eq=False)
class Site:
    """The group of a cache at which a kind is used, and the choices made for it.

    kernels: makes backends of K and V. dtype: of what layers give. device: the pool's.
    """

    layout: KVLayout
    index: int
    pool: Tensor
    heads: Heads
    kernels: KernelFactory
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    fp8: Fp8Entries | None = field(init=False)  # of entries of 8 bits with scales of their layer
    rows: Fp8Rows | None = field(init=False)  # of those that carry their own

    def __post_init__(self) -> None:
        self.dtype, self.device = self.layout.dtype, self.pool.device
        self.rows = self.layout.fp8_rows(self.index)
        self.fp8 = None if self.rows else Fp8Entries.of_group(self.layout, self.index, self.device)


class ServedKind(Kind):
    """takes: the type of x, what a layer gives for its new tokens. serves: the call of Attention that takes x, or makes
    it. holds: what the entries are, in errors."""

    takes: type
    serves = "run"
    holds: str
    needs_call = False
    """Whether layers attend by more than x, so that `serves` is not run()."""
    of_latents = False
    """Whether LatentHeads read the entries, or the entries next to which they stand."""
    by_token = False
    """Whether a GPU and graph buffers look entries up by token: see TokenForward."""

    @abstractmethod
    def backend(self, site: Site) -> AttentionBackend[Any]:
        """Makes the backend that stores the entries and attends to them. InvalidArgument where no kernels serve the
        site."""

    @abstractmethod
    def check_inputs(self, num_tokens: int, x: Any, site: Site) -> None:
        """InvalidArgument unless x, of type `takes`, fits num_tokens tokens."""

    def check_query(self, num_tokens: int, x: Query, site: Site) -> None:
        """InvalidArgument unless x is Attention.read's for num_tokens tokens; of kinds whose backends read."""
        raise NotImplementedError(f"{type(self).__name__} is not read")

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        """InvalidArgument unless kernels on a GPU serve group `index` of a layout. heads: of latents. Needs no GPU."""


def kind_of(group: LayerGroup) -> ServedKind:
    """InvalidArgument unless layers can attend by the kind of a group."""
    if not isinstance(group.kind, ServedKind):
        raise InvalidArgument(f"kind is {group.kind!r}; it must be a kind of tandem.cache.kinds")
    return group.kind


def check_gpu(layout: KVLayout, heads: LatentHeads | None) -> None:
    """InvalidArgument unless kernels on a GPU serve all groups of a layout. heads: of the groups with latents."""
    for index, group in enumerate(layout.groups):
        kind_of(group).check_gpu(index, layout, heads)
