"""Random programs on two paged caches that send to each other, against caches that keep every token by itself."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.errors import InvalidArgument, OutOfPages
from tandem.cache.layout import KVLayout, LayerGroup
from tandem.cache.paged_cache import PagedKVCache
from tests.cache.naive import (
    HEAD_DIM,
    LATENT_HEADS,
    MAX_LENGTH,
    NaiveCache,
    NaiveSequence,
    draw_inputs,
    pools_of,
    ropes_of,
    run,
    windowed,
)
from tests.cache.peer_writer import PeerWriter
from tests.tolerances import assert_close

PAGE_SIZE, NUM_PAGES, MOST_SEQUENCES, LONGEST = 4, 20, 5, 30
PLAIN = KVLayout((LayerGroup((1,), 1, HEAD_DIM), LayerGroup((0,), 2, HEAD_DIM)), PAGE_SIZE, torch.float32)
LATENT = KVLayout((LayerGroup((1,), 1, 12, latent_rank=8), LayerGroup((0,), 2, HEAD_DIM)), PAGE_SIZE, torch.float32)
LAYOUTS = {
    "plain": PLAIN,
    "latent": LATENT,
    "window of 7": windowed(PLAIN, None, 7),
    "windows of 4 and 13": windowed(PLAIN, 4, 13),
}


@dataclass
class Transfer:
    """Positions begin … end - 1 of `source` (on the other side) on their way to `target`."""

    source: int
    target: int
    begin: int
    end: int


@dataclass
class Side:
    """One paged cache, its naive twin, and what a caller of it knows. Every token has an id that no other has.

    queries: the furthest position of each sequence from which one has looked back: what no window shows from there on
    is gone. reserved: a length and the longest append.
    """

    cache: PagedKVCache
    naive: NaiveCache
    tokens: dict[int, list[int]] = field(default_factory=dict)
    queries: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, tuple[int, int]] = field(default_factory=dict)
    published: list[tuple[list[int], NaiveSequence]] = field(default_factory=list)
    incoming: dict[int, Transfer] = field(default_factory=dict)
    draining: dict[int, int] = field(default_factory=dict)  # what was removed → who still may write it

    def resting(self) -> list[int]:
        """Sequences that are not being received."""
        return [sequence for sequence in self.tokens if sequence not in self.incoming]

    def remove(self, sequence: int) -> None:
        self.cache.remove_sequence(sequence)
        self.naive.remove(sequence)
        self.reserved.pop(sequence, None)
        del self.tokens[sequence], self.queries[sequence]
        transfer = self.incoming.pop(sequence, None)
        if transfer is not None:
            self.draining[sequence] = transfer.source

    def room_for(self, sequence: int, length: int) -> int:
        """The most pages of one group that growing to `length` can take."""
        row = self.cache._table.row(sequence)
        held = min(int(group.ends[row]) for group in self.cache._table.groups)
        return max(-(-length // PAGE_SIZE) - held, 0) + 1  # one to copy

    def first_places(self, query: int) -> list[int]:
        windows = [group.window or MAX_LENGTH for group in self.cache.layout.groups]
        return [max(query - window + 1, 0) // PAGE_SIZE for window in windows]

    def can_be_cut(self, sequence: int, length: int) -> bool:
        """Whether the windows at `length` show nothing that is gone."""
        return self.first_places(length) == self.first_places(max(length, self.queries[sequence]))


class Program:
    """A random program: each step is one operation on one side, drawn from `seed`."""

    def __init__(self, seed: int, layout: KVLayout) -> None:
        self.random = Random(seed)
        self.layout = layout
        pools = [pools_of(layout, NUM_PAGES) for _ in range(2)]
        self.sides = [
            Side(
                PagedKVCache(
                    layout,
                    own,
                    max_sequences=MOST_SEQUENCES,
                    max_sequence_length=MAX_LENGTH,
                    rope=ropes_of(layout),
                    writer=PeerWriter(pe, pools),
                    latent=LATENT_HEADS if layout.has_latents else None,
                ),
                NaiveCache(layout, ropes_of(layout)),
            )
            for pe, own in enumerate(pools)
        ]
        self.next_sequence = 0
        self.next_token = 0

    def new_sequence(self) -> int:
        self.next_sequence += 1
        return self.next_sequence

    def pick(self, choices: list[int]) -> int | None:
        return self.random.choice(choices) if choices else None

    def step(self) -> None:
        operations = {
            self.add: 2.0,
            self.append: 8.0,
            self.fork: 2.0,
            self.pop: 3.0,
            self.reserve: 1.0,
            self.remove: 2.0,
            self.send: 3.0,
            self.settle: 1.0,
        }
        if not self.layout.has_windows:
            operations |= {self.publish: 2.0, self.match: 2.0, self.clear_prefixes: 0.2}
        (operation,) = self.random.choices(list(operations), list(operations.values()))
        operation(self.random.randrange(2))
        self.check_contents()
        self.check_pages()

    def add(self, pe: int) -> None:
        side = self.sides[pe]
        if len(side.tokens) < MOST_SEQUENCES:
            sequence = self.new_sequence()
            side.cache.add_sequence(sequence)
            side.naive.add(sequence)
            side.tokens[sequence], side.queries[sequence] = [], 0

    def append(self, pe: int) -> None:
        side = self.sides[pe]
        growing = [sequence for sequence in side.resting() if len(side.tokens[sequence]) < LONGEST]
        if not growing:
            return
        batch = self.random.sample(growing, self.random.randint(1, len(growing)))
        most = self.random.choice([1, 9])
        counts = [min(self.random.randint(1, most), LONGEST - len(side.tokens[sequence])) for sequence in batch]
        lengths = [len(side.tokens[sequence]) + count for sequence, count in zip(batch, counts, strict=True)]
        inputs = draw_inputs(self.layout, sum(counts), seed=self.next_token)
        free = side.cache.num_free_pages
        try:
            outputs = run(side.cache, batch, counts, inputs)
        except OutOfPages:
            assert free < sum(map(side.room_for, batch, lengths))
            kept = [side.reserved.get(sequence, (0, 0)) for sequence in batch]
            assert any(
                length > most or count > longest
                for length, count, (most, longest) in zip(lengths, counts, kept, strict=True)
            )
            return
        for actual, expected in zip(outputs, side.naive.run(batch, counts, inputs), strict=True):
            assert_close(actual, expected)
        for sequence, count in zip(batch, counts, strict=True):
            side.queries[sequence] = max(side.queries[sequence], len(side.tokens[sequence]))
            side.tokens[sequence] += range(self.next_token, self.next_token + count)
            self.next_token += count
        self.land(pe, batch)

    def land(self, pe: int, batch: list[int]) -> None:
        """Ends the transfers from `pe` that its last forward, of `batch`, completed."""
        side, other = self.sides[pe], self.sides[1 - pe]
        for target, transfer in list(other.incoming.items()):
            if transfer.source not in batch:
                continue
            reached = min(max(len(side.tokens[transfer.source]), transfer.begin), transfer.end)
            assert side.cache.num_sent(transfer.source) == reached - transfer.begin
            assert side.cache.sends_done(transfer.source) == (reached == transfer.end)
            if reached < transfer.end:
                continue
            other.cache.finish_receive(target)
            del other.incoming[target]
            source, into = side.naive.sequences[transfer.source], other.naive.sequences[target]
            arrived = slice(transfer.begin, transfer.end)
            into.keys = [torch.cat((k, s[arrived])) for k, s in zip(into.keys, source.keys, strict=True)]
            into.values = [torch.cat((v, s[arrived])) for v, s in zip(into.values, source.values, strict=True)]
            other.tokens[target] += side.tokens[transfer.source][arrived]
            other.queries[target] = max(other.queries[target], transfer.end)

    def fork(self, pe: int) -> None:
        side = self.sides[pe]
        parent = self.pick(side.resting())
        if parent is None or len(side.tokens) == MOST_SEQUENCES:
            return
        length = self.random.randint(0, len(side.tokens[parent]))
        child = self.new_sequence()
        whole = length == len(side.tokens[parent]) and self.random.random() < 0.5
        try:
            side.cache.fork_sequence(parent, child, -1 if whole else length)
        except OutOfPages:
            assert length % PAGE_SIZE or parent in side.reserved
            assert side.cache.num_free_pages == 0 or parent in side.reserved
            return
        except InvalidArgument:
            assert length
            assert not side.can_be_cut(parent, length)
            return
        assert not length or side.can_be_cut(parent, length)
        side.naive.fork(parent, child, length)
        side.tokens[child], side.queries[child] = side.tokens[parent][:length], length

    def pop(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(side.resting())
        if sequence is None:
            return
        count = min(self.random.choice([1, 2, 3, 9, LONGEST]), len(side.tokens[sequence]))
        try:
            side.cache.pop(sequence, count)
        except OutOfPages:
            assert sequence in side.reserved
            return
        except InvalidArgument:
            assert not side.can_be_cut(sequence, len(side.tokens[sequence]) - count)
            return
        assert side.can_be_cut(sequence, len(side.tokens[sequence]) - count)
        side.naive.pop(sequence, count)
        del side.tokens[sequence][len(side.tokens[sequence]) - count :]

    def reserve(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(list(side.tokens))
        if sequence is None:
            return
        tokens = self.random.randint(0, LONGEST)
        longest = self.random.choice([1, 9])
        free = side.cache.num_free_pages
        try:
            side.cache.reserve(sequence, tokens, longest)
        except OutOfPages:
            assert free < side.room_for(sequence, tokens)
            return
        side.reserved[sequence] = tokens, longest

    def remove(self, pe: int) -> None:
        sequence = self.pick(list(self.sides[pe].tokens))
        if sequence is not None:
            self.sides[pe].remove(sequence)

    def send(self, pe: int) -> None:
        """prepare_receive there and mark_send here."""
        side, other = self.sides[pe], self.sides[1 - pe]
        marked = {transfer.source for transfer in other.incoming.values()}
        source = self.pick([sequence for sequence in side.resting() if side.cache.sends_done(sequence)])
        target = self.pick(other.resting())
        if source is None or target is None or source in marked:
            return
        begin, held = len(other.tokens[target]), len(side.tokens[source])
        if max(begin, held) >= LONGEST:
            return
        end = min(max(begin, held) + self.random.randint(1, 9), LONGEST)
        if self.layout.has_windows and not other.cache.sends_done(target):
            with pytest.raises(InvalidArgument, match="is marked to be sent"):
                other.cache.prepare_receive(target, end - begin)
            return
        free = other.cache.num_free_pages
        try:
            position_map = other.cache.prepare_receive(target, end - begin)
        except OutOfPages:
            assert free < other.room_for(target, end)
            return
        assert (position_map.start_position, position_map.end_position) == (begin, end)
        side.cache.mark_send(source, begin, position_map, 1 - pe)
        other.incoming[target] = Transfer(source, target, begin, end)

    def settle(self, pe: int) -> None:
        """The writers of sequences that were removed are quiet now: their marks go with them."""
        side, other = self.sides[pe], self.sides[1 - pe]
        for target, source in side.draining.items():
            if source in other.tokens:
                other.remove(source)
            side.cache.finish_receive(target)
        side.draining.clear()

    def publish(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(side.resting())
        if sequence is None:
            return
        tokens = side.tokens[sequence][: self.random.randint(0, len(side.tokens[sequence]))]
        side.cache.publish_prefix(sequence, tokens)
        naive = side.naive.sequences[sequence]
        side.published.append((tokens, NaiveSequence(list(naive.keys), list(naive.values))))
        if len(side.tokens) < MOST_SEQUENCES:
            assert self.match_tokens(side, [*tokens, -1]) == len(tokens) // PAGE_SIZE * PAGE_SIZE

    def match(self, pe: int) -> None:
        side = self.sides[pe]
        if side.published and len(side.tokens) < MOST_SEQUENCES:
            tokens, _ = self.random.choice(side.published)
            cut = self.random.randint(0, len(tokens))
            self.match_tokens(side, tokens[:cut] + [-1] * self.random.randint(0, 5))

    def match_tokens(self, side: Side, tokens: list[int]) -> int:
        """Adds a sequence that takes what the index knows of tokens."""
        sequence = self.new_sequence()
        side.cache.add_sequence(sequence)
        matched = side.cache.match_prefix(sequence, tokens)
        assert matched % PAGE_SIZE == 0
        assert matched < max(len(tokens), 1)
        naive = next(of for known, of in side.published if known[:matched] == tokens[:matched])
        side.naive.sequences[sequence] = NaiveSequence(
            [k[:matched] for k in naive.keys], [v[:matched] for v in naive.values]
        )
        side.tokens[sequence], side.queries[sequence] = tokens[:matched], 0
        return matched

    def clear_prefixes(self, pe: int) -> None:
        self.sides[pe].cache.clear_prefixes()

    def check_contents(self) -> None:
        for side in self.sides:
            for sequence, naive in side.naive.sequences.items():
                transfer = side.incoming.get(sequence)
                assert side.cache.num_tokens(sequence) == (transfer.end if transfer else naive.length)
                begin = min(side.cache.first_position(sequence), naive.length)
                stored = side.cache.gather_kv(sequence, begin, naive.length)
                for layer, (k, v) in enumerate(stored):
                    assert_close(k, naive.keys[layer][begin:])
                    assert torch.equal(v.double(), naive.values[layer][begin:])
                if transfer is None:
                    row, table = side.cache._table.row(sequence), side.cache._table
                    begins = [int(group.begins[row]) for group in table.groups]
                    assert begins == side.first_places(side.queries[sequence])

    def check_pages(self) -> None:
        """Every reference is a sequence's or the index's, and every page that has none is free or drains."""
        for side in self.sides:
            cache = side.cache
            rows = [cache._table.row(sequence) for sequence in side.tokens]
            for allocator, group in zip(cache._pools._allocators, cache._table.groups, strict=True):
                held = [group.held(row) for row in rows]
                counts = np.bincount(np.concatenate([np.empty(0, np.int32), *held]), minlength=NUM_PAGES)
                indexed = allocator.references - counts
                assert ((indexed == 0) | (indexed == 1)).all()
                assert int(indexed.sum()) == cache.num_cached_pages
                unused = int((allocator.references == 0).sum())
                assert allocator.num_free + allocator.num_draining == unused
            if not side.draining:
                assert cache.num_draining_pages == 0

    def end(self) -> None:
        for side in self.sides:
            side.cache.clear()
        for side in self.sides:
            assert side.cache.is_empty
            for sequence in [*side.draining, *side.incoming]:
                side.cache.finish_receive(sequence)
            assert (side.cache.num_free_pages, side.cache.num_draining_pages) == (NUM_PAGES, 0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), steps=st.integers(50, 200))
def test_random_programs(layout: KVLayout, seed: int, steps: int) -> None:
    program = Program(seed, layout)
    for _ in range(steps):
        program.step()
    program.end()
