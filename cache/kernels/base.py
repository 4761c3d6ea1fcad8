"""What an attention backend does for one layer group of a paged KV cache."""

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

FLASHINFER_HEAD_DIMS = (64, 128, 256)  # of K and V of 16 bits, which FlashInfer is compiled for
GPU_HEAD_DIMS = (*FLASHINFER_HEAD_DIMS, 512)  # with those that Triton's kernels serve


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do for its pool. Callers read this, and never ask for the backend's class."""

    trees: bool = True  # attend to nodes of token trees, and move slots
    pushes: bool = False  # append into mapped pools of peers, see push_with_append
    sharing: SharingRule | None = None  # when sequences read shared pages once for all; None: never
    step_graphs: bool = False  # decode steps in graph buffers
    sharing_graphs: bool = False  # decode steps whose sequences share pages, in graph buffers
    verify_graphs: bool = False  # verify steps in graph buffers
    shifts: bool = True  # these, where the device makes rows shorter than they were planned
    sliding_graphs: bool = False  # decode steps in which sequences slide, in graph buffers
    reads: bool = False  # attend to what is stored without appending, see read() and read_part()


@dataclass(frozen=True)
class Limits:
    """What a forward in graph buffers may hold: up to num_tokens new tokens of up to num_sequences sequences."""

    num_tokens: int
    num_sequences: int
    num_q_heads: int
    inputs: tuple[int, ...]  # elements of each int64 array that the caller fills along
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
        """As of_step, of steps in one graph, each of which computes the next new position of up to `size` sequences.
        The forward is planned for the last of them, and the device moves its rows; see GraphBuffers.attention."""
        return cls(size, size, num_q_heads, (size,) * num_inputs, one_each=True, in_chain=True)

    @classmethod
    def of_verification(cls, size: int, num_q_heads: int, num_inputs: int) -> "Limits":
        """A verify step of up to `size` tokens. Each of num_inputs arrays has an element a token."""
        return cls(size, size, num_q_heads, (size,) * num_inputs, one_each=True, runs=True)

    @classmethod
    def of_prompts(cls, size: int, num_sequences: int, num_q_heads: int) -> "Limits":
        """Up to `size` tokens. The caller fills their ids, and the rows whose logits are wanted, one a sequence."""
        return cls(size, num_sequences, num_q_heads, (size, num_sequences), one_each=False)

    def without_sharing(self) -> "Limits":
        return replace(self, sharing=False)

    def in_chunks(self, chunk: int | None) -> "Limits":
        """Of a layer group whose prompts become a sequence for each chunk of so many positions, see split_by_chunks:
        any of them may cross a border, and a long one more than that. None: they do not."""
        if chunk is None or self.one_each:
            return self
        most = 2 * self.num_sequences + self.num_tokens // chunk
        return replace(self, num_sequences=min(most, self.num_tokens))


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """PageTables of B sequences at fixed addresses on the device.

    slots: int32 [T], negative for a token that is not stored. kv_indptr int32 [B + 1], kv_last_page_len int32 [B],
    kv_indices int32, as many as can be needed. qo_indptr: int32 [B + 1], the sequences' tokens; those from qo_indptr[B]
    on are padding. None: each sequence has one.
    preceding: int32 [B], of a verify step: how many of the rows right before a row are earlier new tokens of the same
    sequence. None: each row is of another sequence.
    sliding: int32 [6 · B], of a step in which sequences may slide: the fields of SlidingRows one behind the other.
    kept: int32 [B], of a group that keeps states: the page that gets a snapshot of the state behind a row, negative for
    none.
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

    own: what the group's backend planned; only the backend reads it. rotation: of the new tokens; None without RoPE.
    sliding: the sequences with a sliding window; None where there is none. tokens: as the tables have them. In graph
    buffers own is the GroupBuffers, tokens is None, and tables and sends are empty.
    """

    own: Any
    rotation: Rotation | None
    tables: PageTables = NO_TABLES
    sends: tuple[Send, ...] = ()
    sliding: SlidingParts | None = None
    tokens: TokenLayout | None = None
    num_tokens: int = 0
    stored: StoredLayers | None = None  # takes note of layers once they are stored
    captured: bool = False  # in graph buffers
    pushes_late: bool = False  # cached entries go behind the last layer: they are on their way up while layers run


NO_PLAN = GroupPlan(None, None)
"""Of a group that has no part in a forward."""


class QKV(NamedTuple):
    """What a layer that keeps K and V attends with: q [T, num_q_heads, head_dim], k and v [T, num_kv_heads, head_dim].

    sinks: [num_q_heads], any float dtype: a logit for each head that is added to the softmax's denominator. norm: of q
    and k, before they are rotated. out: contiguous, shaped like q. A backend may write o there and return this tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    norm: HeadNorm | None = None
    out: Tensor | None = None


class Query(NamedTuple):
    """What a layer attends with to K and V that are stored already: q [T, num_q_heads, head_dim].

    sinks, out: see QKV. norm: of q, before it is rotated.
    """

    q: Tensor
    sinks: Tensor | None = None
    norm: HeadNorm | None = None
    out: Tensor | None = None


class Part(NamedTuple):
    """Attention to some of the keys: o [T, num_q_heads, head_dim] in q's dtype, and lse, float32 [T, num_q_heads]: the
    logarithm, of base e, of the sum of e^score over these keys."""

    o: Tensor
    lse: Tensor


class Latents(NamedTuple):
    """What a layer that keeps latents attends with: q [T, num_heads, key_dim + rotated], latents [T, rank], keys
    [T, rotated]. All three may be overwritten.

    chosen: int32 [n, top_k], of a layer whose queries choose: the positions, in order, that each of the n choosers (see
    Choosers) attends to, then -1. In graph buffers all tokens choose.
    """

    q: Tensor
    latents: Tensor
    keys: Tensor
    up: UpProjections
    chosen: Tensor | None = None


class Index(NamedTuple):
    """What a layer chooses positions by, see tandem.cache.kernels.index_keys: q [T, heads, still + rotated], the new
    tokens' keys in their parts [T, still] and [T, rotated], and weights float32 [T, heads]. All but the weights may be
    overwritten."""

    q: Tensor
    still: Tensor
    rotated: Tensor
    weights: Tensor


class Entries(NamedTuple):
    """What a layer stores beside what it attends to: of each new entry k [n, heads, head_dim], and v where there are
    two planes."""

    k: Tensor
    v: Tensor | None = None


class Extra(NamedTuple):
    """What the n new tokens of one sequence attend to beside their windows: entries [m, D], and seen bool [n, m],
    whether a token attends to an entry. first: the first of the tokens among the packed ones."""

    entries: Tensor
    seen: Tensor
    first: int


class SharedKV(NamedTuple):
    """What a layer attends with whose K and V are the same numbers: q [T, num_heads, D] and kv [T, 1, D], not rotated;
    sinks [num_heads], see QKV. extra: for each sequence of the forward, or None.

    RoPE rotates neighbours, the last rotary_dim numbers, and the output is rotated back.
    """

    q: Tensor
    kv: Tensor
    sinks: Tensor
    extra: Sequence[Extra] | None = None


class IndexQuery(NamedTuple):
    """What a layer chooses compressed entries by: q [T, heads, Di], rotated here, and weights float32 [T, heads]."""

    q: Tensor
    weights: Tensor


class Compression(NamedTuple):
    """What the new tokens of a layer give to compressed entries, see tandem.cache.kernels.torch.compressed.

    values, gates: float32 [T, W], what entries are made of, then what index keys are made of, as they are stored. bias:
    float32 [every, W], added to gates by the position in the entry. norms: weights [D], and [Di] where there are index
    keys. query: by which tokens choose, where there are.
    """

    values: Tensor
    gates: Tensor
    bias: Tensor
    norms: tuple[Tensor, ...]
    eps: float
    query: IndexQuery | None = None


InputsT = TypeVar("InputsT")
Appended = Callable[[Tensor | None, Tensor | None], None]
"""A function that takes k and v as they were stored, between append and attention. Of latents: the entries and None. k
is None where no page writer needs it."""
PeerPool = Callable[[int], Tensor | None]
"""PageWriter.peer_pool of one layer group."""


@dataclass(frozen=True, eq=False)
class StepPages:
    """Where a decode megakernel finds the KV of its layers of a step.

    rotation: of the step's tokens. scale: of the scores. scales: of a pool of 8-bit entries, as Fp8Entries has them;
    None: K and V are stored as they are.
    """

    pool: Tensor
    tables: DeviceTables
    rotation: Rotation
    scale: float
    scales: Tensor | None


class GroupBuffers:
    """Graph buffers of one layer group. A replay reads their tables, which the caller fills. As they are here they need
    nothing else, and compute no layer: kernels of several groups do."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        """The next replay computes this forward; waits for no device. The tables are filled up with padding. Those for
        sharing leave out the pages of segments, which the buffers copy themselves."""

    def takes_shared(self, shared: SharedPrefixes) -> bool:
        """Whether buffers for sharing have room for these segments."""
        return False

    def begin_captured(self, by_layers: bool = False) -> None:
        """Queues, in the graph, what all layers of a replay need that follows from the tables.

        The forward ran once before it is captured. What that run did not need may be left out, unless by_layers.
        """

    def run(self, plan: GroupPlan, layer: int, x: Any) -> Tensor:
        """See AttentionBackend.run."""
        raise NotImplementedError(f"{type(self).__name__} computes no layer")

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        """See AttentionBackend.read."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def step_pages(self, plan: GroupPlan, layers: range) -> StepPages | None:
        """For a decode megakernel in place of run() of these layers; None where run() does more than causal
        attention."""
        return None


class AttentionBackend(PageOperations, Generic[InputsT]):
    """Bound to one pool. plan() once a forward, on the host; run() once a layer. layer counts within the group.

    A pool of K and V is `[num_pages, layers, 2, num_kv_heads, page_size, head_dim]`, and InputsT is QKV. One of latents
    is `[num_pages, layers, 1, 1, page_size, rank + rotated]`, see tandem.cache.plan.latent, and InputsT is Latents. One
    of index keys is shaped alike, InputsT is Index, and run() returns what is chosen in place of o. One of entries
    beside these has one plane or two, InputsT is Entries, and run() returns k. One whose K and V are the same numbers
    has one plane, and InputsT is SharedKV. A subclass has no graph buffers and does
    not store into peers, unless it says so.
    """

    capabilities = Capabilities()

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        """The most tokens of up to num_sequences prompts that graph buffers may hold; 0: there are none for prompts."""
        return 0

    def buffers(self, limits: Limits, tables: DeviceTables) -> GroupBuffers:
        """Graph buffers over `tables`, where capabilities have some. They plan and run their forwards themselves."""
        return GroupBuffers()

    @abstractmethod
    def plan(self, tokens: TokenLayout, tables: PageTables) -> Any:
        """Whatever run() needs of a forward that is not in graph buffers; waits for no device."""

    def largest_sharing_step(self, num_q_heads: int) -> int:
        """Rows that a step in buffers for sharing may have; 0 where there are none."""
        return 0

    def push_with_append(self, own: Any, sends: Sequence[Send], peer_pool: PeerPool) -> tuple[Any, tuple[Send, ...]]:
        """A plan whose append also stores into mapped peers, and the sends that are left for the page writer."""
        return own, tuple(sends)

    @abstractmethod
    def run(self, plan: GroupPlan, layer: int, x: InputsT, appended: Appended | None = None) -> Tensor:
        """o of each new token: norms, rotates, stores K and V in the token's slot, calls `appended`, attends.

        Each token attends to its sequence's positions up to its own, in its window, and q head h to KV head
        h // (num_q_heads / num_kv_heads). A node of a token tree sees its ancestors. Rows of padding mean nothing.
        """

    def store_kv(self, plan: GroupPlan, layer: int, k: Tensor, v: Tensor, appended: Appended | None = None) -> None:
        """Stores K and V of each new token, as they are, and calls `appended`."""
        raise NotImplementedError(f"{type(self).__name__} does not store without attending")

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        """As run(), but K and V of the new tokens have been stored by `layer`, which ran before; nothing is stored."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> Any:
        """Whatever read_part() needs; tokens and tables as for plan(). Not causal: each token sees all that its
        sequence has in the tables. Nobody's tokens are nodes of trees."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")

    def read_part(self, own: Any, layer: int, q: Tensor) -> Part:
        """As read(), of q as it is, which is rotated. own: of plan_read()."""
        raise NotImplementedError(f"{type(self).__name__} does not attend without appending")


KVBackend = AttentionBackend[QKV]
LatentBackend = AttentionBackend[Latents]
IndexBackend = AttentionBackend[Index]
EntryBackend = AttentionBackend[Entries]
KernelFactory = Callable[[Tensor, Scoring, Fp8Entries | None], KVBackend]
"""A backend for a pool of K and V, scored so. The third says how K and V become its elements; None: as they are."""
