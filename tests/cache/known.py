"""The state of two paged caches that their caller knows, and the calls that they take in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

import numpy as np
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kernels.base import GroupPlan
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.spans import NO_WINDOW, Sliding
from tandem.cache.plan.tables import TokenLayout, lay_out_tokens, look_up_pages
from tests.cache.naive import first_seen, run_layer
from tests.cache.oracle import MAX_POSITIONS
from tests.support.tvm_cache import TvmCache

LONGEST, LONGEST_STREAM = 30, 300


@contextmanager
def watched(owner: object, name: str) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of each call of a method meanwhile; mock's patches cost as much as a small step."""
    calls, method = list[dict[str, Any]](), getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return method(*arguments, **options)

    vars(owner)[name] = call
    try:
        yield calls
    finally:
        del vars(owner)[name]


@dataclass
class Known:
    """One sequence. ids: its tokens, also those that left a window. nodes, parents: its open tree.

    queries: the furthest position from which one has looked back: what no window shows from there on is gone.
    reserved: a length and the longest append. stream: how it slides; kept: which of its positions are there.
    sends: which positions its last map asked for.
    """

    ids: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    queries: int = 0
    reserved: tuple[int, int] | None = None
    stream: Sliding | None = None
    kept: list[int] = field(default_factory=list)
    sends: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.nodes)

    @property
    def longest(self) -> int:
        """How long it may become."""
        return LONGEST_STREAM if self.slides else LONGEST

    @property
    def slides(self) -> bool:
        """Whether it evicts: some only keep K before RoPE."""
        return self.stream is not None and self.stream.window != NO_WINDOW

    def path(self, node: int) -> list[int]:
        """Ids from a root to a node."""
        ids = []
        while node >= 0:
            ids.append(self.nodes[node])
            node = self.parents[node]
        return ids[::-1]

    def slide(self, append: int, *, receive: bool = False) -> None:
        """Slides a stream by `append` positions, none of which is in ids yet."""
        assert self.stream is not None
        window, sink, after, _ = self.stream
        excess = len(self.kept) + (append if receive or not after else 0) - window
        evicted = max(min(excess, excess if receive else max(len(self.kept) - sink, 0)), 0)
        self.kept += range(len(self.ids), len(self.ids) + append)
        del self.kept[sink : sink + evicted]

    def outruns(self, append: int) -> bool:
        """Whether rotations are not known for so many positions more of a stream, which meet K that has moved."""
        if self.stream is None or not self.slides or len(self.ids) + append <= MAX_POSITIONS:
            return False
        grown = replace(self, kept=list(self.kept))
        grown.slide(append)
        moved = len(grown.kept) < len(self.ids) + append
        return moved and any(self.stream.sink <= position < self.stream.rotated for position in grown.kept)

    def texts(self, added: list[int]) -> list[list[int]]:
        """Returns the tokens that each of `added`, already appended, attends to, itself last, at the positions 0, 1,
        …"""
        if self.nodes:
            return [self.ids + self.path(node) for node in range(len(self.nodes) - len(added), len(self.nodes))]
        ids = self.ids if self.stream is None else [self.ids[position] for position in self.kept]
        return [ids[: len(ids) - len(added) + index + 1] for index in range(len(added))]

    def positions(self, added: list[int]) -> list[list[int]]:
        """Returns for each of texts() the positions of its tokens in the sequence's own text, by which spans go."""
        if self.stream is None:
            return [list(range(len(text))) for text in self.texts(added)]
        return [self.kept[: len(self.kept) - len(added) + index + 1] for index in range(len(added))]

    def can_send(self, into: "Known", begin: int, end: int, first: int) -> bool:
        """Whether what `into`, a stream as this is, keeps of positions begin … end - 1 is there and stays until all
        are appended. first: what is before leaves the windows of the groups."""
        assert self.stream is not None
        window, sink, _, _ = self.stream
        wanted = {position for position in into.kept if max(begin, first) <= position < len(self.ids)}
        staying = {of for of in self.kept if of < sink or of >= end - (window - sink)}
        return wanted <= staying


@dataclass
class Transfer:
    """Positions begin … end - 1 of `source` (on the other side) on their way to `target`."""

    source: int
    begin: int
    end: int


@dataclass
class Side:
    """One cache, and its caller's knowledge. batch: of the last forward; stepped: it was a step."""

    cache: TvmCache
    known: dict[int, Known] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)
    stepped: bool = False
    published: list[list[int]] = field(default_factory=list)
    incoming: dict[int, Transfer] = field(default_factory=dict)
    draining: dict[int, int] = field(default_factory=dict)  # what was removed → who still may write it

    def resting(self, *, trees: bool = False) -> list[int]:
        """Sequences that are not being received; those with open trees only on demand."""
        return [of for of, known in self.known.items() if of not in self.incoming and (trees or not known.nodes)]

    def growing(self, *, trees: bool = False) -> list[int]:
        """Returns the resting sequences that may become longer."""
        return [of for of in self.resting(trees=trees) if self.known[of].length < self.known[of].longest]

    def remove(self, sequence: int) -> None:
        self.cache.remove_sequence(sequence)
        del self.known[sequence]
        transfer = self.incoming.pop(sequence, None)
        if transfer is not None:
            self.draining[sequence] = transfer.source

    def forward(
        self,
        batch: list[int],
        counts: list[int],
        inputs: list[tuple[Tensor, Tensor, Tensor]],
        parents: list[list[int] | None],
        sinks: Tensor | None,
        beside: Callable[[Forward], None] = lambda plan: None,
    ) -> list[Tensor]:
        """o of each layer. parents: of each sequence's new tokens, None for plain ones. beside: stores what layers keep
        beside what they attend to."""
        trees = parents if any(of is not None for of in parents) else None
        with watched(self.cache._pages, "step") as steps:
            plan = self.cache.begin_forward(batch, counts, token_tree_parents=trees)
        self.batch, self.stepped = batch, bool(steps)
        check_tables(self.cache, plan)
        outputs = [run_layer(self.cache, plan, layer, *of_layer, sinks) for layer, of_layer in enumerate(inputs)]
        beside(plan)
        self.cache.end_forward(plan)
        return outputs

    def pages_for(self, sequence: int, count: int) -> int:
        """The most pages of one group that `count` positions more can take; large ones count as several."""
        known, layout = self.known[sequence], self.cache.layout
        if known.stream is not None:
            return -(-count // layout.page_size) + 2
        row = self.cache._table.row(sequence)
        held = [int(group.ends[row]) for group in self.cache._table.groups]
        ends = [-(-(known.length + count) // paging.positions) for paging in layout.paging]
        each = zip(ends, held, layout.pages_together, strict=True)
        return max((max(end - there, 0) + 1) * together for end, there, together in each)  # one to copy

    def most_pages(self, sequence: int) -> int:
        """Returns the most pages that a sequence holds of one group; large pages count as several."""
        row = self.cache._table.row(sequence)
        held = [int(group.ends[row] - group.begins[row]) for group in self.cache._table.groups]
        return max(map(mul, held, self.cache.layout.pages_together))

    def has_reserved(self, sequence: int) -> bool:
        """Whether it has ever had a reservation, which one that begins to slide keeps as it was."""
        return bool(self.cache._table.reserved[self.cache._table.row(sequence)])

    def is_promised(self, sequence: int, count: int) -> bool:
        """Whether a reservation covers `count` positions more."""
        known = self.known[sequence]
        if known.reserved is None:
            return False
        most, longest = known.reserved
        return len(known.nodes) + count <= longest and (known.slides or known.length + count <= most)

    def leaves_chunk(self, sequence: int, count: int, parents: list[int] | None) -> bool:
        """Whether `count` more nodes do not fit into the chunk that their tree begins in, or complete an entry for
        several positions."""
        if parents is None:
            return False
        base, length = len(self.known[sequence].ids), self.known[sequence].length
        spans = [group.keeps for group in self.cache.layout.groups]
        chunks = [span.chunk for span in spans if span.chunk is not None]
        completes = any(base // span.every != (length + count) // span.every for span in spans if span.every > 1)
        return completes or any(base // chunk != (length + count - 1) // chunk for chunk in chunks)

    def overtakes(self, sequence: int, count: int) -> bool:
        """Whether a stream that has not sent what it holds would grow beyond the end of its map."""
        known = self.known[sequence]
        if known.stream is None or known.sends is None:
            return False
        begin, end = known.sends
        sent = begin + self.cache.num_sent(sequence)
        return sent < min(len(known.ids), end) and len(known.ids) + count > end

    def first_page_indexes(self, query: int) -> list[int]:
        size, grain = self.cache.layout.page_size, self.cache.layout.grain
        spans = [group.keeps for group in self.cache.layout.groups]
        return [max(first_seen(span, query // grain * grain), 0) // size for span in spans]

    def first_needed(self, query: int) -> int:
        """The first position that some group keeps for a query."""
        return min(self.first_page_indexes(query)) * self.cache.layout.page_size

    def is_shown(self, sequence: int, length: int) -> bool:
        """Whether the windows of the groups show nothing at `length` that they have dropped."""
        queries = max(length, self.known[sequence].queries)
        return self.first_page_indexes(length) == self.first_page_indexes(queries)

    def can_be_cut(self, sequence: int, length: int) -> bool:
        """Whether nothing is gone that a query at `length` sees."""
        known = self.known[sequence]
        if known.stream is None or not self.is_shown(sequence, length):
            return self.is_shown(sequence, length)
        least = known.stream.sink if len(known.kept) < len(known.ids) else 0
        return len(known.kept) - (len(known.ids) - length) >= least


def check_tables(cache: TvmCache, plan: Forward) -> None:
    """Checks that the plan is what it would be without a forward before it, and that it writes to no shared page."""
    table, size = cache._table, cache.layout.page_size
    rows = np.array([table.row(sequence) for sequence in plan.seq_ids])
    appends = np.diff(plan.tokens.qo_indptr).astype(np.int64)
    tokens = lay_out_tokens(table.lengths[rows] - appends, appends)
    for name in ("qo_indptr", "seq_lens", "positions", "owners"):
        assert_same(getattr(plan.tokens, name), getattr(tokens, name))
    for index, (group, planned) in enumerate(zip(table.groups, plan.attention.plans, strict=True)):
        keeps = cache.layout.groups[index].keeps
        if keeps.every > 1:
            check_entries(group, rows, tokens, planned)
            assert not cache._pools.allocators[index].are_shared(planned.tables.slot_mapping // group.page_size).any()
            continue
        parts = part_tokens(tokens, keeps.chunk or MAX_POSITIONS)
        of = rows[[sequence for sequence, _, _ in parts]]
        begins = group.begins[of] if keeps.drops_past else None
        if keeps.chunk is not None:
            begins = np.array([begin // keeps.chunk * keeps.chunk // size for _, begin, _ in parts])
        lengths, counts = np.array([[begin, end - begin] for _, begin, end in parts]).T
        tables = look_up_pages(group.pages, of, lay_out_tokens(lengths, counts), size, begins)
        for name in ("slot_mapping", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_lens"):
            assert_same(getattr(planned.tables, name), getattr(tables, name))
        assert not cache._pools.allocators[index].are_shared(planned.tables.slot_mapping // size).any()


def check_entries(group: GroupTable, rows: np.ndarray, tokens: TokenLayout, planned: GroupPlan) -> None:
    """Checks entry by entry the plan of a group with an entry for several positions."""
    size, every, slots, owners, entries, pages, indptr = group.page_size, group.every, [], [], [], [], [0]
    befores = tokens.seq_lens - np.diff(tokens.qo_indptr)
    for owner, (row, before, after) in enumerate(zip(rows, befores, tokens.seq_lens, strict=True)):
        for entry in range(before // every, after // every):
            slots.append(int(group.pages[row, entry // size]) * size + entry % size)
            owners.append(owner)
            entries.append(entry)
        pages += group.pages[row, : -(-(after // every) // size)].tolist()
        indptr.append(len(pages))
    assert planned.tokens is not None
    assert planned.num_tokens == len(slots)
    assert planned.tokens.owners.tolist() == owners
    assert planned.tokens.positions.tolist() == entries
    assert planned.tables.slot_mapping.tolist() == slots
    assert planned.tables.kv_indices.tolist() == pages
    assert planned.tables.kv_indptr.tolist() == indptr
    assert planned.tables.kv_lens.tolist() == (tokens.seq_lens // every).tolist()


def part_tokens(tokens: TokenLayout, chunk: int) -> list[tuple[int, int, int]]:
    """A sequence's number, and the positions begin … end - 1 of new tokens in one chunk, of all in their order."""
    parts: list[tuple[int, int, int]] = []
    for sequence, position in zip(tokens.owners.tolist(), tokens.positions.tolist(), strict=True):
        if parts and parts[-1][0] == sequence and position % chunk:
            parts[-1] = (sequence, parts[-1][1], position + 1)
        else:
            parts.append((sequence, position, position + 1))
    return parts


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert np.array_equal(actual, expected)
