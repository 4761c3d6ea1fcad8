"""The plan of one forward: which tokens go where, and what each sequence attends to. Pure numpy."""

from dataclasses import dataclass
from typing import Any

from tandem.cache.attention.stream_attention import StreamParts
from tandem.cache.pages.send_marks import Sent
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, Send, TokenLayout


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """One layer group of a forward. kernel_plan is what the group's kernels made of tables; only they read it.

    rotation is None without RoPE. streams: the sequences with a sliding window; None where there is none.
    """

    tables: PageTables
    rotation: Rotation | None
    sends: tuple[Send, ...]
    streams: StreamParts | None
    kernel_plan: Any


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One forward over B sequences, made by PagedKVCache.begin_forward and passed to each attention call.

    sent: what end_forward counts as issued. standing: of its sequences, when it was made.
    """

    seq_ids: tuple[int, ...]
    tokens: TokenLayout
    groups: tuple[GroupPlan, ...]
    sent: Sent | None
    standing: Standing

    @property
    def num_tokens(self) -> int:
        return self.tokens.positions.size

    @property
    def qo_indptr(self) -> Int32Array:
        return self.tokens.qo_indptr

    @property
    def seq_lens(self) -> Int32Array:
        return self.tokens.seq_lens

    @property
    def positions(self) -> Int32Array:
        return self.tokens.positions
