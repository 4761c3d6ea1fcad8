"""What a backend's kernels do for one layer group of a paged KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule
from tandem.cache.plan.tables import PageTables, Send, TokenLayout

GPU_HEAD_DIMS = (64, 128, 256)  # of K and V of 16 bits, which FlashInfer is compiled for


class PageKernels(Protocol):
    """Bound to one pool of pages, whatever its entries are; layer counts within the group."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> Any:
        """On the host, once a forward: whatever append and attend need of it."""
        ...

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        """All layers of pages sources[i] to targets[i], int32 [n] each."""
        ...

    def clear_pages(self, pages: Int32Array) -> None:
        """Makes sure that what stands in slots not yet written cannot reach an output (0 · NaN is NaN)."""
        ...

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Copies of k and v [n, num_kv_heads, head_dim] at `slots`, int32 [n], in the dtype in which they came.

        Of latents see LatentKernels.
        """
        ...


class Kernels(PageKernels, Protocol):
    """Bound to one pool `[num_pages, layers, 2, num_kv_heads, page_size, head_dim]`.

    plan() once a forward; append() and attend() once a layer, with what it returned.
    """

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: Any
    ) -> tuple[Tensor, Tensor]:
        """q and k rotated; the latter and v go into the new tokens' slots.

        q is [T, num_q_heads, head_dim], k and v are [T, num_kv_heads, head_dim], left as they are. Without rotation q
        and k may be what is returned.
        """
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: Any, sinks: Tensor | None = None) -> Tensor:
        """o [T, num_q_heads, head_dim]: each token attends to its sequence's positions up to its own, in its window.

        q and k are what append() returned just before, v is what it was given. num_q_heads is a multiple of
        num_kv_heads, and q head h reads KV head h // (num_q_heads / num_kv_heads). sinks: [num_q_heads], any float
        dtype: a logit per head that is added to the softmax's denominator.
        """
        ...


class LatentKernels(PageKernels, Protocol):
    """Bound to one pool `[num_pages, layers, 1, 1, page_size, rank + rotated]`, see tandem.cache.plan.latent.

    read_slots gives whole entries as k, [n, 1, rank + rotated], and their latents as v, [n, 1, rank].
    """

    def append(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, rotation: Rotation | None, plan: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates the last numbers of q and keys; latents and keys go into the new tokens' slots.

        q [T, num_heads, key_dim + rotated], latents [T, rank], keys [T, rotated]; any may be overwritten. Returns q
        and the entries [T, 1, rank + rotated]; None where no writer takes them from there.
        """
        ...

    def attend(self, layer: int, q: Tensor, plan: Any, up: UpProjections) -> Tensor:
        """o [T, num_heads, value_dim]: each token attends to its sequence's positions up to its own."""
        ...


class KernelFactory(Protocol):
    """Kernels for a pool. fp8: how K and V become its elements; None: as they are."""

    def __call__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> Kernels: ...


@runtime_checkable
class SharingKernels(Kernels, Protocol):
    """Kernels that read pages once for all sequences that share them, as tables.shared says."""

    @property
    def sharing(self) -> SharingRule | None:
        """When that is faster; None: it is not done for this pool."""
        ...


@runtime_checkable
class TreeKernels(PageKernels, Protocol):
    """Kernels, of K and V or of latents, whose attend() gives each token of TokenLayout.trees what it may see, and no
    more."""

    def move_slots(self, sources: Int32Array, targets: Int32Array) -> None:
        """All layers of slots sources[i] to targets[i], int32 [n] each; a target may be the source of another move,
        which still moves what was there before."""
        ...


PeerPool = Callable[[int], Tensor | None]
"""PageWriter.peer_pool of one layer group."""


@runtime_checkable
class PushingKernels(PageKernels, Protocol):
    """Kernels whose append can also store into pools of peers."""

    def push_with_append(self, plan: Any, sends: Sequence[Send], peer_pool: PeerPool) -> tuple[Any, tuple[Send, ...]]:
        """A plan whose append also stores into mapped peers, and the sends that are left for the page writer."""
        ...


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """PageTables of a fixed number of sequences, one new token each, at places on the device that stay.

    slots: int32 [B], negative for a token that is not stored. kv_indptr int32 [B + 1], kv_last_page_len int32 [B],
    kv_indices int32, as many as can be needed.
    """

    slots: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, eq=False)
class PromptTables:
    """PageTables of T tokens of B sequences, any number of them each, at places on the device that stay.

    qo_indptr: int32 [B + 1], the sequences' tokens. slots: int32 [T], negative for a token that is not stored, as those
    behind qo_indptr[B] are. kv_indptr int32 [B + 1], kv_last_page_len int32 [B], kv_indices int32, as many as can be
    needed.
    """

    qo_indptr: Tensor
    slots: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor


@runtime_checkable
class GraphKernels(PageKernels, Protocol):
    """Kernels that can do a decode step inside a CUDA graph, which is replayed with other tables: StepKernels, or
    LatentStepKernels."""

    def fixed_plan(self, tables: DeviceTables, num_q_heads: int) -> Any:
        """A plan whose steps read `tables` whenever they run, after refill() announced their content."""
        ...

    def refill(self, plan: Any, tables: PageTables) -> None:
        """On the host: what `plan` runs next are these tables; the caller copies them to the device's."""
        ...


@runtime_checkable
class StepKernels(GraphKernels, Kernels, Protocol):
    """Graph kernels of a pool of K and V."""

    def step(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None,
        plan: Any,
        sinks: Tensor | None,
        norm: HeadNorm | None,
    ) -> Tensor:
        """o [B, num_q_heads, head_dim]: what append() and then attend() give, of q and k after `norm`; plan is a fixed
        one. What rows of padding give means nothing.
        """
        ...


@dataclass(frozen=True, eq=False)
class StepPages:
    """Where a kernel of more than one layer of a step finds the KV: what StepKernels.step() has besides the layers' own
    tensors. rotation: of the step's tokens. scale: of the scores. scales: of a pool of 8-bit entries, as Fp8Entries has
    them; None: K and V are stored as they are.
    """

    pool: Tensor
    tables: DeviceTables
    rotation: Rotation
    scale: float
    scales: Tensor | None


@runtime_checkable
class OpenStepKernels(StepKernels, Protocol):
    """Graph kernels that let a kernel of more than a layer do what step() does."""

    def step_pages(self, plan: Any, rotation: Rotation | None) -> StepPages | None:
        """None where step() does more with this plan than causal attention."""
        ...


@runtime_checkable
class LatentStepKernels(GraphKernels, LatentKernels, Protocol):
    """Graph kernels of a pool of latents."""

    def step_latents(
        self,
        layer: int,
        q: Tensor,
        latents: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        plan: Any,
        up: UpProjections,
    ) -> Tensor:
        """o [B, num_heads, value_dim]: what append() and then attend() give; plan is a fixed one."""
        ...


@runtime_checkable
class SharingGraphKernels(StepKernels, SharingKernels, Protocol):
    """Graph kernels that can share in a graph too, up to some number of segments."""

    def fixed_sharing_plan(self, tables: DeviceTables, num_q_heads: int) -> Any:
        """A fixed_plan() for refills with what the sequences share, if anything.

        `tables` are then without the pages that segments cover; those of the segments the kernels copy themselves.
        """
        ...

    def takes_shared(self, plan: Any, shared: SharedPrefixes) -> bool:
        """Whether a sharing plan has room for it."""
        ...


@runtime_checkable
class PromptGraphKernels(StepKernels, Protocol):
    """Graph kernels whose step() can also be that of prompts, of which each sequence has several new tokens."""

    def most_prompt_tokens(self, num_sequences: int, num_q_heads: int) -> int:
        """How many tokens of up to num_sequences sequences a fixed plan may have."""
        ...

    def fixed_prompts_plan(self, tables: PromptTables, num_q_heads: int) -> Any:
        """As GraphKernels.fixed_plan()."""
        ...

    def refill_prompts(self, plan: Any, qo_indptr: Int32Array, tables: PageTables) -> None:
        """As GraphKernels.refill(); both are filled up with padding."""
        ...
