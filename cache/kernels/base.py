"""The contract of an attention backend, which serves one layer group of a paged KV cache."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.page_memory import PageOperations
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.sliding import SlidingParts
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.cache.plan.tables import PageTables, Send, TokenLayout

FLASHINFER_HEAD_DIMS = (64, 128, 256)  # for which FlashInfer is compiled, with K and V of 16 bits
GPU_HEAD_DIMS = (*FLASHINFER_HEAD_DIMS, 512)  # Triton's kernels serve 512


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do for its pool. Callers read this, and never ask for the backend's class."""

    trees: bool = True  # attend to nodes of token trees, and move slots
    pushes: bool = False  # append into mapped pools of peers, see push_with_append
    sharing: SharingRule | None = None  # when sequences attend to shared pages together; None: never
    step_graphs: bool = False  # decode steps in graph buffers
    sharing_graphs: bool = False  # decode steps whose sequences share pages, in graph buffers
    verify_graphs: bool = False  # verify steps in graph buffers
    shifts: bool = True  # verify steps whose rows the device shortens after planning
    sliding_graphs: bool = False  # decode steps in which sequences slide, in graph buffers
    reads: bool = False  # attend to stored K and V without appending, see read() and read_part()


@dataclass(frozen=True)
class Limits:
    """The capacity of graph buffers: up to num_tokens new tokens of up to num_sequences sequences."""

    num_tokens: int
    num_sequences: int
    num_q_heads: int
    inputs: tuple[int, ...]  # elements of each int64 array that the caller fills, too
    one_each: bool  # a decode step: each sequence, or row of a verify step, has one new token
    sharing: bool = False  # sequences that share pages attend to them together
    runs: bool = False  # a verify step: neighbouring rows may be new tokens of one sequence
    sliding: bool = False  # a decode step: sequences may slide
    in_chain: bool = False  # a decode step of the last of several new positions of each sequence, see of_chain()

    @classmethod
    def of_step(
        cls, size: int, num_q_heads: int, num_inputs: int, *, sharing: bool = False, sliding: bool = False
    ) -> "Limits":
        """A decode step of up to `size` sequences. Each of num_inputs arrays has an element a sequence."""
        inputs = (size,) * num_inputs
        return cls(size, size, num_q_heads, inputs, one_each=True, sharing=sharing, sliding=sliding)

    @classmethod
    def of_chain(cls, size: int, num_q_heads: int, num_inputs: int) -> "Limits":
        """Like of_step, for several steps in one graph. Each step computes the next new position of up to `size`
        sequences. The forward is planned for the last step, and the device moves its rows; see
        GraphBuffers.attention."""
        return cls(size, size, num_q_heads, (size,) * num_inputs, one_each=True, in_chain=True)

    @classmethod
    def of_verification(cls, size: int, num_q_heads: int, num_inputs: int) -> "Limits":
        """A verify step of up to `size` tokens. Each of num_inputs arrays has an element a token."""
        return cls(size, size, num_q_heads, (size,) * num_inputs, one_each=True, runs=True)

    @classmethod
    def of_prompts(cls, size: int, num_sequences: int, num_q_heads: int) -> "Limits":
        """Prompts of up to `size` tokens. The caller fills their ids, and for each sequence the row whose logits it
        needs."""
        return cls(size, num_sequences, num_q_heads, (size, num_sequences), one_each=False)

    def without_sharing(self) -> "Limits":
        return replace(self, sharing=False)

    def in_chunks(self, chunk: int | None) -> "Limits":
        """The same for a layer group that treats each chunk of a prompt as a sequence, see split_by_chunks. Any prompt
        may cross a border of chunks, and a long one several. chunk: positions of a chunk; None: the group has no
        chunks."""
        if chunk is None or self.one_each:
            return self
        most = 2 * self.num_sequences + self.num_tokens // chunk
        return replace(self, num_sequences=min(most, self.num_tokens))


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """PageTables of B sequences at fixed addresses on the device.

    slots: int32 [T], negative for a token that is not stored. kv_indptr: int32 [B + 1]. kv_last_page_len: int32 [B].
    kv_indices: int32, with room for the largest forward.
    qo_indptr: int32 [B + 1], the sequences' tokens. Tokens from qo_indptr[B] on are padding. None: one token each.
    preceding: int32 [B], for verify steps: the number of rows just before a row that are earlier new tokens of the same
    sequence. None: each row belongs to another sequence.
    sliding: int32 [6 · B], for steps in which sequences may slide: the fields of SlidingRows, one after the other.
    kept: int32 [B], for a group with states: the page for a snapshot of the state after a row, negative for none.
    """

    slots: Tensor
    kv_indptr: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor | None = None
    preceding: Tensor | None = None
    sliding: Tensor | None = None
    kept: Tensor | None = None


EMPTY = np.empty(0, np.int32)
NO_TABLES = PageTables(EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)


class GroupPlan(NamedTuple):
    """One layer group of a forward.

    own: the backend's own plan, which only the backend reads. rotation: of the new tokens; None without RoPE. sliding:
    the sequences with a sliding window; None without any. tokens: the layout of the tables. In graph buffers own is the
    GroupBuffers, tokens is None, and tables and sends are empty.
    """

    own: Any
    rotation: Rotation | None
    tables: PageTables = NO_TABLES
    sends: tuple[Send, ...] = ()
    sliding: SlidingParts | None = None
    tokens: TokenLayout | None = None
    num_tokens: int = 0
    stored: StoredLayers | None = None  # told of each layer once it is stored
    captured: bool = False  # whether the forward runs in graph buffers
    pushes_late: bool = False  # cached entries are pushed after the last layer, because they are still being copied up


NO_PLAN = GroupPlan(None, None)
"""The plan of a group that takes no part in a forward."""


class QKV(NamedTuple):
    """The inputs of attention with K and V: q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim].

    sinks: [num_q_heads], any float dtype: one logit for each head, which is added to the softmax's denominator. norm:
    applied to q and k before rotation. out: contiguous, shaped like q. A backend may write o there and return it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    norm: HeadNorm | None = None
    out: Tensor | None = None


class Query(NamedTuple):
    """The inputs of attention to K and V that are already stored: q [T, num_q_heads, head_dim].

    sinks, out: see QKV. norm: applied to q before rotation.
    """

    q: Tensor
    sinks: Tensor | None = None
    norm: HeadNorm | None = None
    out: Tensor | None = None


class Part(NamedTuple):
    """Attention to a part of the keys: o [T, num_q_heads, head_dim] in q's dtype, and lse float32 [T, num_q_heads], the
    natural logarithm of the sum of e^score over these keys."""

    o: Tensor
    lse: Tensor


class Latents(NamedTuple):
    """The inputs of attention with latents: q [T, num_heads, key_dim + rotated], latents [T, rank], keys [T, rotated].
    The backend may overwrite all three.

    chosen: int32 [n, top_k], for a layer whose queries choose positions: the sorted positions of each of the n choosers
    (see Choosers), then -1. In graph buffers all tokens choose.
    """

    q: Tensor
    latents: Tensor
    keys: Tensor
    up: UpProjections
    chosen: Tensor | None = None


class Index(NamedTuple):
    """The inputs by which a layer chooses positions, see tandem.cache.kernels.index_keys: q [T, heads, still +
    rotated], the new tokens' keys in two parts [T, still] and [T, rotated], and weights float32 [T, heads]. The backend
    may overwrite all but the weights."""

    q: Tensor
    still: Tensor
    rotated: Tensor
    weights: Tensor


class Entries(NamedTuple):
    """Entries that a layer stores in addition to those that it attends to: k [n, heads, head_dim], and v if the pool
    has two planes."""

    k: Tensor
    v: Tensor | None = None


class Extra(NamedTuple):
    """Entries that the n new tokens of one sequence attend to in addition to their windows: entries [m, D], and seen
    bool [n, m], whether a token attends to an entry. first: the index of the first token in the forward."""

    entries: Tensor
    seen: Tensor
    first: int


class SharedKV(NamedTuple):
    """The inputs of attention whose K and V are the same numbers: q [T, num_heads, D] and kv [T, 1, D], not rotated;
    sinks [num_heads], see QKV. extra: one for each sequence of the forward, or None.

    RoPE rotates the last rotary_dim numbers in neighbouring pairs. The output is rotated back.
    """

    q: Tensor
    kv: Tensor
    sinks: Tensor
    extra: Sequence[Extra] | None = None


class IndexQuery(NamedTuple):
    """The inputs by which a layer chooses compressed entries: q [T, heads, Di], which the backend rotates, and weights
    float32 [T, heads]."""

    q: Tensor
    weights: Tensor


class Compression(NamedTuple):
    """What new tokens contribute to compressed entries, see tandem.cache.kernels.torch.compressed.

    values, gates: float32 [T, W], the columns for entries, then those for index keys, in the order of storage. bias:
    float32 [every, W], added to gates by the position in the entry. norms: weights [D], and [Di] with index keys.
    query: with index keys, the tokens' queries.
    """

    values: Tensor
    gates: Tensor
    bias: Tensor
    norms: tuple[Tensor, ...]
    eps: float
    query: IndexQuery | None = None


InputsT = TypeVar("InputsT")
Appended = Callable[[Tensor | None, Tensor | None], None]
"""A function that gets the stored k and v between append and attention; for latents, the entries and None. k is None if
no page writer needs it."""
PeerPool = Callable[[int], Tensor | None]
"""PageWriter.peer_pool for one layer group."""


@dataclass(frozen=True, eq=False)
class StepPages:
    """The KV that a decode megakernel needs for its layers in a step.

    rotation: of the step's tokens. scale: the factor of scores. scales: for a pool of 8-bit entries, see Fp8Entries;
    None: K and V are stored unscaled.
    """

    pool: Tensor
    tables: DeviceTables
    rotation: Rotation
    scale: float
    scales: Tensor | None


class GroupBuffers:
    """Graph buffers of one layer group. A replay reads their tables, which the caller fills. This base class needs
    nothing else and computes no layer, for groups whose layers other kernels compute."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        """Prepares the next replay to compute this forward, without waiting for a device. The tables are padded to
        their full size. Tables for sharing leave out the pages of shared segments, which the buffers copy
        themselves."""

    def takes_shared(self, shared: SharedPrefixes) -> bool:
        """Whether buffers for sharing have room for these segments."""
        return False

    def begin_captured(self, by_layers: bool = False) -> None:
        """Adds to the graph what all layers of a replay need from the tables.

        The forward has run once before its capture. The graph may leave out what that run did not need, unless
        by_layers.
        """

    def run(self, plan: GroupPlan, layer: int, x: Any) -> Tensor:
        """See AttentionBackend.run."""
        raise NotImplementedError(f"{type(self).__name__} computes no layer")

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        """See AttentionBackend.read."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def step_pages(self, plan: GroupPlan, layers: range) -> StepPages | None:
        """Returns what a decode megakernel needs to replace run() of these layers, or None if run() does more than
        causal attention."""
        return None


class AttentionBackend(PageOperations, Generic[InputsT]):
    """A backend serves one pool. It plans once a forward, on the host, and runs once a layer. Layers are counted within
    the group.

    | pool | shape | InputsT | run() returns |
    |---|---|---|---|
    | K and V | [num_pages, layers, 2, num_kv_heads, page_size, head_dim] | QKV | o |
    | latents, see tandem.cache.plan.latent | [num_pages, layers, 1, 1, page_size, rank + rotated] | Latents | o |
    | index keys | the same | Index | the chosen positions |
    | further entries | one plane or two | Entries | k |
    | K and V of equal numbers | one plane | SharedKV | o |

    By default a subclass has no graph buffers and does not store into peers.
    """

    capabilities = Capabilities()

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        """The most tokens of up to num_sequences prompts in graph buffers; 0 without graph buffers for prompts."""
        return 0

    def buffers(self, limits: Limits, tables: DeviceTables) -> GroupBuffers:
        """Graph buffers over `tables`, if capabilities include any. They plan and run their own forwards."""
        return GroupBuffers()

    @abstractmethod
    def plan(self, tokens: TokenLayout, tables: PageTables) -> Any:
        """The plan of a forward that is not in graph buffers, for run(). It waits for no device."""

    def largest_sharing_step(self, num_q_heads: int) -> int:
        """The most rows of a step in graph buffers for sharing; 0 without such buffers."""
        return 0

    def push_with_append(self, own: Any, sends: Sequence[Send], peer_pool: PeerPool) -> tuple[Any, tuple[Send, ...]]:
        """A plan whose append also stores into mapped peers, and the remaining sends, which the page writer makes."""
        return own, tuple(sends)

    @abstractmethod
    def run(self, plan: GroupPlan, layer: int, x: InputsT, appended: Appended | None = None) -> Tensor:
        """Applies norms, rotates, stores K and V in each token's slot, calls `appended` and attends. Returns o.

        Each token attends to its sequence's positions up to its own, within its window. q head h attends to KV head
        h // (num_q_heads / num_kv_heads). A node of a token tree attends to its ancestors. Padding rows are undefined.
        """

    def store_kv(self, plan: GroupPlan, layer: int, k: Tensor, v: Tensor, appended: Appended | None = None) -> None:
        """Stores K and V of each new token unchanged, and calls `appended`."""
        raise NotImplementedError(f"{type(self).__name__} does not store without attending")

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        """Attends like run(), but stores nothing: `layer` ran before and has stored K and V of the new tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> Any:
        """The plan for read_part(); tokens and tables as for plan(), without token trees. Not causal: each token
        attends to all of its sequence's positions in the tables."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def read_part(self, own: Any, layer: int, q: Tensor) -> Part:
        """Attends like read(), with a q that is already normed and rotated. own: from plan_read()."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")


KVBackend = AttentionBackend[QKV]
LatentBackend = AttentionBackend[Latents]
IndexBackend = AttentionBackend[Index]
EntryBackend = AttentionBackend[Entries]
KernelFactory = Callable[[Tensor, Scoring, Fp8Entries | None], KVBackend]
"""Makes a backend for a pool of K and V with this scoring. Fp8Entries: how K and V are stored in 8 bits; None: as they
are."""
