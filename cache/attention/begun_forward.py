"""A forward from its begin to its commit."""

from collections.abc import Callable
from typing import NamedTuple

from tandem.cache.attention.forward import Attention
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.pages.send_marks import Sent
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.tables import TokenLayout


class Forward(NamedTuple):
    """One forward over B sequences, made by PagedKVCache.begin.

    The caller computes all layers through `attention`, or replays the graph that was captured for `buffers`; then
    commit() ends the forward.
    """

    seq_ids: tuple[int, ...]
    tokens: TokenLayout
    attention: Attention
    sent: Sent | None  # what commit() counts as issued
    standing: Standing | None  # of the sequences, when the forward was planned; None of a step in graph buffers
    buffers: GraphBuffers | None = None
    is_next: Callable[[], bool] | None = None  # of one that was foreseen: whether it is the next of its sequences
