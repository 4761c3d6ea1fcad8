"""Random programs over the whole public API of two paged caches that send to each other.

Each step is one call, or one forward, on one side, drawn from a seed. What a cache holds and computes is compared with
an Oracle that learns of each token what it follows, and with the rules of the API for what must be refused. Every other
program has a store below its prefix index.
"""

from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
import torch

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kinds.compressed import compressed_groups
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.spans import NO_WINDOW, Sliding
from tests.cache.inspection import check_contents, check_held, check_outputs, check_pages
from tests.cache.known import LONGEST, Known, Side, Transfer
from tests.cache.late_lanes import await_copies, keep_late
from tests.cache.naive import pools_of
from tests.cache.oracle import NUM_TOKENS, Oracle, Setting, cache_of
from tests.cache.peer_writer import PeerWriter

QUERY_HEADS, MOST_SEQUENCES = 4, 5
STREAMS = [Sliding(8, 2), Sliding(12, 0, True), Sliding(9, 4), Sliding(3, 2, True)]
NO_TREE = "has an open token tree"


class Program:
    def __init__(self, seed: int, setting: Setting, oracle: Oracle) -> None:
        """oracle: the setting's."""
        self.random, self.spot_checks = Random(seed), Random(seed)
        self.stream = self.random.choice(STREAMS)
        self.setting, self.layout = setting, setting.layout
        self.oracle = oracle
        self.num_pages = setting.positions // self.layout.page_size
        self._sinks = None if setting.sinks is None else torch.tensor(setting.sinks)
        pools = [pools_of(self.layout, self.num_pages) for _ in range(2)]
        self.sides = [
            Side(cache_of(setting, own, PeerWriter(pe, pools), MOST_SEQUENCES)) for pe, own in enumerate(pools)
        ]
        self.next_sequence = 0
        self.takes_streams = all(group.kind.no_sliding is None for group in self.layout.groups)
        self._operations: dict[Callable[[int], None], float] = {
            self.add: 2.0,
            self.append: 8.0,
            self.step: 3.0,
            self.fork: 2.0,
            self.pop: 3.0,
            self.slide: 1.0,
            self.reserve: 1.0,
            self.remove: 2.0,
            self.send: 3.0,
            self.settle: 1.0,
            self.commit: 2.0,
            self.misuse: 1.0,
            self.publish: 2.0,
            self.match: 2.0,
            self.clear_prefixes: 0.2,
        }
        self.counts: dict[str, int] = {}
        if seed % 2:
            for side, own in zip(self.sides, pools, strict=True):
                slots = Random(seed).randrange(20, 60)
                keep_late(side.cache, [slots] * len(own), seed, verify=seed % 4 == 1)

    def run(self, steps: int) -> None:
        with torch.inference_mode():
            for step in range(steps):
                (operation,) = self.random.choices(list(self._operations), list(self._operations.values()))
                pe = self.random.randrange(2)
                operation(pe)
                self.check(pe, everything=step % 16 == 0)
            self.end()

    def count(self, what: str) -> None:
        """Counts an event. Tests look at the counts, because a program without an event shows nothing about it."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def new_sequence(self) -> int:
        self.next_sequence += 1
        return self.next_sequence

    def pick(self, choices: list[int]) -> int | None:
        return self.random.choice(choices) if choices else None

    def draw_ids(self, count: int) -> list[int]:
        return self.random.choices(range(NUM_TOKENS), k=count)

    # One sequence

    def add(self, pe: int) -> None:
        side = self.sides[pe]
        if len(side.known) == MOST_SEQUENCES:
            return
        sequence = self.new_sequence()
        side.cache.add_sequence(sequence)
        side.known[sequence] = Known()
        if self.takes_streams and self.random.random() < self.setting.streams:
            self.enable(side, sequence)

    def enable(self, side: Side, sequence: int) -> None:
        window, sink, after, _ = self.stream
        side.cache.enable_sliding_window(sequence, window, sink, evict_after=after)
        known = side.known[sequence]
        rotated = len(known.ids) if known.stream is None else known.stream.rotated
        if known.stream is None:
            known.kept = list(range(len(known.ids)))
        known.stream, known.reserved = self.stream._replace(rotated=rotated), None

    def slide(self, pe: int) -> None:
        """A sequence that holds positions begins to."""
        side = self.sides[pe]
        able = [of for of in side.resting() if not side.known[of].slides and side.cache.sends_done(of)]
        sequence = self.pick(able) if self.takes_streams else None
        if sequence is None or self.random.random() > self.setting.streams:
            return
        self.enable(side, sequence)
        self.count("streams of what was held")

    def fork(self, pe: int) -> None:
        side = self.sides[pe]
        parent = self.pick(side.resting())
        if parent is None or len(side.known) == MOST_SEQUENCES:
            return
        of = side.known[parent]
        length = self.random.randint(0, len(of.ids))
        sink = of.stream.sink if of.stream is not None and of.slides else None
        if sink is not None and self.random.random() < 0.8:
            length = min(length, sink)
        child, whole = self.new_sequence(), length == len(of.ids) and self.random.random() < 0.5
        slides = self.random.random() < 0.6
        allowed = side.can_be_cut(parent, length)
        if sink is not None:
            allowed = length <= sink and side.is_shown(parent, length)
        try:
            side.cache.fork_sequence(parent, child, -1 if whole else length, slides=slides)
        except OutOfPages:
            shares = side.most_pages(parent) if self.layout.drops_past else 0  # those in a window count for each user
            assert length % self.layout.page_size or side.has_reserved(parent) or shares
            assert side.cache.num_free_pages <= shares or side.has_reserved(parent)
            return
        except InvalidArgument:
            assert length
            assert not allowed
            return
        assert not length or allowed
        stream = None if of.stream is None else of.stream._replace(rotated=min(of.stream.rotated, length))
        if stream is not None and not (of.slides and slides):
            stream = Sliding(NO_WINDOW, 0, False, stream.rotated) if stream.rotated < length else None
        kept = [] if stream is None else list(range(length))
        side.known[child] = Known(of.ids[:length], queries=length, stream=stream, kept=kept)
        self.count("forks of streams" if of.slides else "forks")
        if stream is not None and stream.window == NO_WINDOW:
            self.count("forks that do not slide")

    def pop(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(side.resting(trees=True))
        if sequence is None:
            return
        known = side.known[sequence]
        count = min(self.random.choice([1, 2, 3, 9, LONGEST]), known.length)
        beyond = len(known.nodes) < count if known.nodes else not side.can_be_cut(sequence, len(known.ids) - count)
        try:
            if count == 2:
                side.cache.pop_each([sequence], [count])
            else:
                side.cache.pop(sequence, count)
        except OutOfPages:
            assert side.has_reserved(sequence)
            return
        except InvalidArgument:
            assert beyond
            return
        assert not beyond
        if known.nodes:
            del known.nodes[len(known.nodes) - count :], known.parents[len(known.parents) - count :]
            self.count("pops of nodes")
            return
        del known.ids[len(known.ids) - count :]
        if known.stream is not None:
            del known.kept[len(known.kept) - count :]
            known.stream = known.stream._replace(rotated=min(known.stream.rotated, len(known.ids)))
            self.count("pops of streams")

    def reserve(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(list(side.known))
        if sequence is None:
            return
        known, longest = side.known[sequence], self.random.choice([1, 9])
        tokens = 1_000_000 if known.slides else self.random.randint(0, LONGEST)
        free = side.cache.num_free_pages
        try:
            side.cache.reserve(sequence, tokens, longest)
        except OutOfPages:
            assert known.stream is not None or free < side.pages_for(sequence, max(tokens - known.length, 0))
            return
        known.reserved = tokens, longest

    def remove(self, pe: int) -> None:
        sequence = self.pick(list(self.sides[pe].known))
        if sequence is not None:
            self.sides[pe].remove(sequence)

    def publish(self, pe: int) -> None:
        side = self.sides[pe]
        sequence = self.pick(side.resting())
        if sequence is None:
            return
        known = side.known[sequence]
        tokens = known.ids[: self.random.randint(0, len(known.ids))]
        if known.stream is not None:
            with pytest.raises(InvalidArgument, match="slides"):
                side.cache.publish_prefix(sequence, tokens)
            return
        side.cache.publish_prefix(sequence, tokens)
        side.published.append(tokens)
        if len(side.known) < MOST_SEQUENCES:
            whole = len(tokens) - len(tokens) % self.layout.grain
            matched = self.match_tokens(side, [*tokens, NUM_TOKENS])
            if matched is not None and side.can_be_cut(sequence, whole):
                seen = [int(group.keeps.first_needed(np.array(whole))) for group in self.layout.groups]
                assert matched == whole or min(seen) == whole  # else nothing is there to be found
            else:
                self.count("windows that have moved on")

    def match(self, pe: int) -> None:
        side = self.sides[pe]
        if side.published and len(side.known) < MOST_SEQUENCES:
            tokens = self.random.choice(side.published)
            cut = self.random.randint(0, len(tokens))
            self.match_tokens(side, tokens[:cut] + [NUM_TOKENS] * self.random.randint(0, 5))

    def match_tokens(self, side: Side, tokens: list[int]) -> int | None:
        """Adds a sequence that takes what the index knows of tokens; None where there is no room for it."""
        sequence, free = self.new_sequence(), side.cache.num_free_pages
        side.cache.add_sequence(sequence)
        try:
            matched = side.cache.match_prefix(sequence, tokens)
        except OutOfPages:
            assert self.layout.drops_past
            assert free == side.cache.num_free_pages < -(-len(tokens) // self.layout.page_size)
            assert side.cache.num_tokens(sequence) == 0
            side.cache.remove_sequence(sequence)
            self.count("matches without room")
            return None
        assert matched % self.layout.grain == 0
        assert matched < max(len(tokens), 1)
        assert any(known[:matched] == tokens[:matched] for known in side.published)
        side.known[sequence] = Known(tokens[:matched], queries=matched)
        self.count("matches" if matched else "nothing matched")
        return matched

    def clear_prefixes(self, pe: int) -> None:
        pools = self.sides[pe].cache._pools
        if pools.prefixes.store is None or self.spot_checks.random() < 0.2:
            pools.prefixes.clear()
            return
        for group in range(len(pools.allocators)):  # into the store
            if count := pools.prefixes.num_evictable[group]:
                pools.prefixes.evict(group, count)

    # Forwards

    def append(self, pe: int) -> None:
        side = self.sides[pe]
        growing = side.growing(trees=True)
        if not growing:
            return
        batch = self.random.sample(growing, self.random.randint(1, len(growing)))
        most = self.random.choice([1, 9, 9, 40])
        counts = [min(self.random.randint(1, most), side.known[of].longest - side.known[of].length) for of in batch]
        parents = [self.draw_parents(side, of, count) for of, count in zip(batch, counts, strict=True)]
        self.forward(pe, batch, counts, parents)

    def step(self, pe: int) -> None:
        """One more token of each sequence of the last forward."""
        side = self.sides[pe]
        if side.batch and set(side.batch) <= set(side.growing()):
            self.forward(pe, side.batch, [1] * len(side.batch), [None] * len(side.batch))

    def forward(self, pe: int, batch: list[int], counts: list[int], parents: list[list[int] | None]) -> None:
        side = self.sides[pe]
        added = [self.draw_ids(count) for count in counts]
        inputs = self.oracle.inputs([id_ for ids in added for id_ in ids])
        free = side.cache.num_free_pages
        if any(map(side.overtakes, batch, counts)):
            with pytest.raises(InvalidArgument, match="up to the end of its position map"):
                side.forward(batch, counts, inputs, parents, self._sinks)
            self.count("appends beyond a map refused")
            return
        if any(map(side.leaves_chunk, batch, counts, parents)):
            with pytest.raises(
                InvalidArgument, match=r"keeps (chunks of|an entry for) .* so the tree may have at most"
            ):
                side.forward(batch, counts, inputs, parents, self._sinks)
            self.count("trees across chunks refused")
            return
        if any(side.known[of].outruns(count) for of, count in zip(batch, counts, strict=True)):
            with pytest.raises(InvalidArgument, match="before K that was rotated by its position has left"):
                side.forward(batch, counts, inputs, parents, self._sinks)
            return
        try:
            store = partial(self.store, side, batch, added)
            outputs = side.forward(batch, counts, inputs, parents, self._sinks, store)
        except OutOfPages:
            assert free < sum(map(side.pages_for, batch, counts))
            assert not all(map(side.is_promised, batch, counts))
            return
        self.count("steps" if side.stepped else "forwards")
        texts, seen = list[list[int]](), list[list[int]]()
        for of, ids, tree in zip(batch, added, parents, strict=True):
            self.grow(side.known[of], ids, tree)
            texts += side.known[of].texts(ids)
            seen += side.known[of].positions(ids)
        check_outputs(outputs, texts, seen, self.oracle)
        self.land(pe, batch)

    def store(self, side: Side, batch: list[int], added: list[list[int]], plan: Forward) -> None:
        """Stores the entries that a forward completes in groups beside others. Nodes stand after what is stored."""
        ids = [side.known[of].ids + side.known[of].nodes + new for of, new in zip(batch, added, strict=True)]
        for (group, layer), oracle in self.oracle.beside.items():
            new = side.cache.new_entries(plan, group)
            counts = np.bincount(new.owners, minlength=len(batch))
            cut = np.split(new.positions, np.cumsum(counts)[:-1])
            made = [oracle.entries(own, which.tolist()) for own, which in zip(ids, cut, strict=True)]
            planes = [torch.cat(plane) for plane in zip(*made, strict=True)]
            side.cache.store(plan, group, layer, *planes)
            if new.positions.size and self.layout.groups[group].keeps.every > 1:
                self.count("entries completed")

    def draw_parents(self, side: Side, sequence: int, count: int) -> list[int] | None:
        """Draws the parents of `count` more nodes where the sequence has a tree or is to open one."""
        known = side.known[sequence]
        nodes = len(known.nodes)
        able = known.stream is None and side.cache.sends_done(sequence)
        if not nodes and (not able or self.random.random() < 0.6):
            return None
        width = self.random.choice([1, 2, 5, nodes + count])
        return [self.random.randint(max(-1, node - width), node - 1) for node in range(nodes, nodes + count)]

    def grow(self, known: Known, added: list[int], parents: list[int] | None) -> None:
        if parents is not None:
            self.count("trees grown" if known.nodes else "trees opened")
            known.queries = max(known.queries, len(known.ids))
            known.nodes += added
            known.parents += parents
            return
        known.queries = max(known.queries, len(known.ids))
        if known.stream is not None:
            known.slide(len(added))
            self.count("streams that slid" if len(known.kept) < len(known.ids) + len(added) else "streams")
        known.ids += added

    def commit(self, pe: int) -> None:
        side = self.sides[pe]
        trees = [of for of in side.resting(trees=True) if side.known[of].nodes]
        batch = self.random.sample(trees, self.random.randint(0, len(trees)))
        if not batch:
            return
        leaves = [self.random.randint(-1, len(side.known[of].nodes) - 1) for of in batch]
        side.cache.commit_token_tree(batch, leaves)
        for of, leaf in zip(batch, leaves, strict=True):
            known = side.known[of]
            known.ids += known.path(leaf)
            known.nodes, known.parents = [], []
            self.count("commits" if leaf >= 0 else "rejections")

    def misuse(self, pe: int) -> None:
        """Makes calls that an open tree does not allow."""
        side = self.sides[pe]
        sequence = self.pick([of for of in side.known if side.known[of].nodes])
        if sequence is None:
            return
        cache, nodes = side.cache, len(side.known[sequence].nodes)
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: cache.begin_forward([sequence], [1]), NO_TREE),
            (lambda: cache.fork_sequence(sequence, 0), NO_TREE),
            (lambda: cache.publish_prefix(sequence, []), NO_TREE),
            (lambda: cache.prepare_receive(sequence, 1), NO_TREE),
            (lambda: cache.enable_sliding_window(sequence, 8, 2), NO_TREE),
            (lambda: cache.begin_forward([sequence], [1], token_tree_parents=[[nodes]]), f"as parent of node {nodes}"),
            (lambda: cache.commit_token_tree([sequence], [nodes]), f"it must be from -1 to {nodes - 1}"),
            (lambda: cache.pop(sequence, nodes + 1), f"counts has {nodes + 1}"),
        ]
        call, message = self.random.choice(calls)
        with pytest.raises(InvalidArgument, match=message):
            call()
        self.count("misuses")

    # Transfers

    def send(self, pe: int) -> None:
        """prepare_receive there and mark_send here."""
        side, other = self.sides[pe], self.sides[1 - pe]
        marked = {transfer.source for transfer in other.incoming.values()}
        source = self.pick([of for of in side.resting() if side.cache.sends_done(of) and of not in marked])
        if source is None:
            return
        own = side.known[source]
        able = [of for of in other.resting() if takes_from(other.known[of], own)]
        if compressed_groups(self.layout):  # entries tell of several tokens: both must have the same before
            able = [of for of in able if own.ids[: other.known[of].length] == other.known[of].ids]
        target = self.pick(able)
        if target is None:
            return
        into = other.known[target]
        begin, held = len(into.ids), len(own.ids)
        rotated, most = into.stream != own.stream, min(into.longest, own.longest)
        if max(begin, held) >= most:
            return
        end = min(max(begin, held) + self.random.choice([1, 2, 9]), most)
        if self.layout.drops_past and not other.cache.sends_done(target):
            with pytest.raises(InvalidArgument, match="is marked to be sent"):
                other.cache.prepare_receive(target, end - begin)
            return
        free = other.cache.num_free_pages
        try:
            position_map = other.cache.prepare_receive(target, end - begin, rotated=rotated)
        except OutOfPages:
            assert free < other.pages_for(target, end - begin)
            return
        await_copies(other.cache)
        assert (position_map.start_position, position_map.end_position) == (begin, end)
        check_held(other, position_map)
        if into.stream is not None:
            into.slide(end - begin, receive=True)
            into.stream = into.stream._replace(rotated=end if rotated else into.stream.rotated)
        other.incoming[target] = Transfer(source, begin, end)
        if own.stream is None or own.can_send(into, begin, end, other.first_needed(end)):
            side.cache.mark_send(source, begin, position_map, 1 - pe)
            own.sends = begin, end
            self.count("sends to streams" if rotated else "sends" if own.stream is None else "sends of streams")
            return
        with pytest.raises(InvalidArgument, match="sliding window"):
            side.cache.mark_send(source, begin, position_map, 1 - pe)
        other.remove(target)
        other.cache.finish_receive(target)
        del other.draining[target]
        self.count("sends of streams refused")

    def land(self, pe: int, batch: list[int]) -> None:
        """Ends the transfers from `pe` that its last forward, of `batch`, completed."""
        side, other = self.sides[pe], self.sides[1 - pe]
        for target, transfer in list(other.incoming.items()):
            if transfer.source not in batch:
                continue
            own, into = side.known[transfer.source], other.known[target]
            reached = min(max(len(own.ids), transfer.begin), transfer.end)
            assert side.cache.num_sent(transfer.source) == reached - transfer.begin
            assert side.cache.sends_done(transfer.source) == (reached == transfer.end)
            if reached < transfer.end:
                continue
            other.cache.finish_receive(target)
            del other.incoming[target]
            into.ids += own.ids[transfer.begin : transfer.end]
            into.queries = max(into.queries, transfer.end)
            self.count("landings" if own.stream is None else "landings of streams")

    def settle(self, pe: int) -> None:
        """The writers of sequences that were removed are quiet now: their marks go with them."""
        side, other = self.sides[pe], self.sides[1 - pe]
        for target, source in side.draining.items():
            if source in other.known:
                other.remove(source)
            side.cache.finish_receive(target)
        side.draining.clear()

    # What must hold after every step

    def check(self, pe: int, *, everything: bool) -> None:
        """Some sequence of one side, or all."""
        for side in self.sides if everything else (self.sides[pe],):
            sequences = list(side.known)
            for sequence in sequences if everything else self.spot_checks.sample(sequences, min(len(sequences), 1)):
                check_contents(side, sequence, self.oracle)
            check_pages(side)

    def end(self) -> None:
        for side in self.sides:
            assert side.cache.pages.host_bad_pages == 0
            side.cache.clear()
        for side in self.sides:
            assert side.cache.is_empty
            for sequence in [*side.draining, *side.incoming]:
                side.cache.finish_receive(sequence)
            assert (side.cache.num_free_pages, side.cache.num_draining_pages) == (self.num_pages, 0)


def takes_from(into: Known, own: Known) -> bool:
    """Whether a sequence may receive from another: one that slides alike, or a plain one while its own K is rotated."""
    return into.stream == own.stream or (
        own.stream is None and into.stream is not None and into.stream.rotated == len(into.ids)
    )
