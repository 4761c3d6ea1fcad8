"""Snapshots of states: prefixes, forks and pops end at one, and what follows is as if computed from token 0."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.recurrent import DeltaShape, RecurrentInputs
from tandem.cache.kernels.torch.delta_rule import unit
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import SnapshotRule
from tests.cache.island import Island
from tests.cache.late_lanes import await_copies, keep_late
from tests.cache.naive import HEAD_DIM, ROPE, pools_of
from tests.cache.peer_writer import PeerWriter
from tests.support.tvm_cache import TvmCache

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=5, value_dim=3, tail=3)
PAGE, EVERY = 4, 8
LAYOUT = KVLayout(
    (LayerGroup((1,), KV(2, HEAD_DIM)), LayerGroup((0, 2), Recurrent(SHAPE))), page_size=PAGE, dtype=torch.float32
)
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
VOCABULARY = 50


def table_of(*shape: int) -> Tensor:
    return torch.randn(VOCABULARY, *shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


MIXED, DECAY, BETA, HEADS = table_of(SHAPE.channels), -table_of(4).abs(), table_of(1, 4)[:, 0].sigmoid(), table_of(2, 8)
CONV = torch.randn(SHAPE.channels, SHAPE.tail + 1, generator=torch.Generator().manual_seed(99))


def naive_outputs(tokens: list[int]) -> Tensor:
    """float64 [T, value_heads, value_dim]: what a layer gives for all tokens of a sequence, from the first on."""
    padded = torch.cat((torch.zeros(SHAPE.tail, SHAPE.channels), MIXED[tokens]))
    windows = [padded[at : at + SHAPE.tail + 1] * CONV.t() for at in range(len(tokens))]
    mixed = torch.nn.functional.silu(torch.stack([one.sum(0) for one in windows]))
    q, k, v = mixed.split((10, 10, 12), 1)
    q, k = (unit(one.view(-1, 2, 5)).repeat_interleave(2, 1).double() for one in (q, k))
    v, state, outputs = v.view(-1, 4, 3).double(), torch.zeros(4, 5, 3, dtype=torch.float64), []
    for at, token in enumerate(tokens):
        state = state * DECAY[token].double().exp()[:, None, None]
        delta = (v[at] - torch.einsum("hkv,hk->hv", state, k[at])) * BETA[token].double()[:, None]
        state = state + k[at][:, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[at] * 5**-0.5))
    return torch.stack(outputs)


def forward(
    cache: TvmCache, tokens: dict[int, list[int]], counts: dict[int, int], *, push: bool = True, drafted: bool = False
) -> None:
    """One forward of the next counts[i] of the tokens of each sequence, compared with all of them from the first on."""
    begins = {sequence: cache.num_tokens(sequence) for sequence in counts}
    new = [token for one, count in counts.items() for token in tokens[one][begins[one] : begins[one] + count]]
    with torch.inference_mode():
        plan = cache.begin(Batch(list(counts), list(counts.values()), push=push, drafted=drafted))
        x = RecurrentInputs(MIXED[new], CONV, DECAY[new], BETA[new])
        outputs = plan.attention.recur(0, x).clone()
        kv = HEADS[new].repeat(1, 1, HEAD_DIM // 8)
        plan.attention.attend(1, kv, kv, kv)
        again = plan.attention.recur(2, x)
        cache.commit(plan)
    expected = torch.cat([naive_outputs(tokens[one][: begins[one] + count])[-count:] for one, count in counts.items()])
    torch.testing.assert_close(outputs.double(), expected, **TOLERANCE)
    torch.testing.assert_close(again.double(), expected, **TOLERANCE)


def island_of(own: int, most: int, drafted: int = 0) -> Island:
    """own: pages of states without those for snapshots, and for states before drafts."""
    pools = [(kv, states[: own + most + drafted].clone()) for kv, states in (pools_of(LAYOUT, 120) for _ in range(2))]
    writers = [PeerWriter(pe, pools) for pe in range(2)]
    rule = SnapshotRule(EVERY, most, drafted)
    caches = [
        TvmCache(LAYOUT, own, max_sequences=8, max_sequence_length=64, rope=ROPE, writer=writer, snapshots=rule)
        for own, writer in zip(pools, writers, strict=True)
    ]
    return Island(caches, writers[0])


def keep_evicted(cache: TvmCache) -> None:
    keep_late(cache, [200, 40], seed=0, verify=True)


@dataclass
class Program:
    """Random calls on the caches of an island. Sequences of a family begin alike."""

    random: Random
    island: Island
    tokens: dict[int, list[int]] = field(default_factory=dict)
    held: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    done: Counter[str] = field(default_factory=Counter)

    def keep_evicted(self) -> None:
        for cache in self.island.caches:
            keep_evicted(cache)

    def draw(self) -> tuple[list[int], bytes]:
        """60 tokens, and the salt that they are shared under."""
        family = Random(self.random.randrange(2))
        base, salt = [family.randrange(VOCABULARY) for _ in range(60)], self.random.choice([b"", b"", b"", b"a"])
        at = self.random.choice([11, 17, 30, 30])
        return base[:at] + [self.random.randrange(VOCABULARY) for _ in range(60 - at)], salt

    def add(self, at: int) -> None:
        cache, new = self.island.caches[at], len(self.tokens)
        self.tokens[new], salt = self.draw()
        cache.add_sequence(new)
        found = cache.match_prefix(new, np.array(self.tokens[new][: self.random.randint(10, 40)]), salt)
        self.done["found" if found else "not found"] += 1
        self.done["between"] += found % EVERY > 0
        self.salts[new] = salt
        self.held[at].append(new)

    def __post_init__(self) -> None:
        self.salts: dict[int, bytes] = {}

    def forward(self, at: int) -> None:
        cache = self.island.caches[at]
        chosen = self.random.sample(self.held[at], self.random.randint(1, len(self.held[at])))
        counts = {one: self.random.choice([1, 1, 3, 9, 20]) for one in chosen if cache.num_tokens(one) < 40}
        if counts:
            forward(cache, self.tokens, counts)

    def publish(self, at: int) -> None:
        cache, one = self.island.caches[at], self.random.choice(self.held[at])
        length = cache.num_tokens(one) - self.random.choice([0, 0, 5])
        cache.publish_prefix(one, np.array(self.tokens[one][: max(length, 0)], np.int64), self.salts[one])

    def positions(self, at: int, sequence: int) -> list[int]:
        cache = self.island.caches[at]
        snapshots = cache._pages.snapshots[1]
        assert snapshots is not None
        length = cache.num_tokens(sequence)
        return sorted({0, *snapshots.positions(cache._table.row(sequence)), length})

    def fork(self, at: int) -> None:
        cache, parent, child = self.island.caches[at], self.random.choice(self.held[at]), len(self.tokens)
        position = self.random.choice(self.positions(at, parent))
        self.done["forks within"] += 0 < position < cache.num_tokens(parent)
        cache.fork_sequence(parent, child, position)
        self.tokens[child] = self.tokens[parent][:position] + self.draw()[0][position:]
        self.salts[child] = self.salts[parent]
        self.held[at].append(child)

    def pop(self, at: int) -> None:
        cache, one = self.island.caches[at], self.random.choice(self.held[at])
        length, position = cache.num_tokens(one), self.random.choice(self.positions(at, one))
        self.done["pops within"] += 0 < position < length
        cache.pop(one, length - position)
        self.tokens[one] = self.tokens[one][:position] + self.draw()[0][position:]

    def send(self, _: int) -> None:
        """Sends a prompt from the first cache to the second. Each may know its beginning."""
        (sender, receiver), one = self.island.caches, len(self.tokens)
        self.tokens[one], self.salts[one] = self.draw()
        prompt = np.array(self.tokens[one][: self.random.randint(2, 40)])
        receiver.add_sequence(one)
        begin = receiver.match_prefix(one, prompt, self.salts[one])
        wanted = receiver.prepare_receive(one, prompt.size - begin)
        await_copies(receiver)
        sender.add_sequence(one)
        known = sender.match_prefix(one, prompt, self.salts[one])
        sender.mark_send(one, begin, wanted, 1)
        forward(sender, self.tokens, {one: prompt.size - known})
        sender.send_cached(one)
        assert sender.sends_done(one)
        receiver.finish_receive(one)
        sender.publish_prefix(one, prompt, self.salts[one])
        sender.remove_sequence(one)
        self.held[1].append(one)
        self.done["sent behind a prefix"] += begin > 0

    def remove(self, at: int) -> None:
        if self.random.random() < 0.7:
            self.publish(at)
        self.island.caches[at].remove_sequence(self.held[at].pop(self.random.randrange(len(self.held[at]))))

    def run(self, turns: int) -> None:
        for turn in range(turns):
            at = turn % 2
            actions = [self.forward, self.forward, self.publish, self.fork, self.pop, self.remove, self.send, self.add]
            action = self.random.choice(actions) if self.held[at] else self.add
            full = len(self.held[1 if action == self.send else at]) >= 4
            if not (full and action in (self.fork, self.add, self.send)):
                action(at)
        for cache in self.island.caches:
            snapshots = cache._pages.snapshots[1]
            assert snapshots is not None
            self.done["evicted"] += snapshots.num_evicted
            self.done["from the host"] += cache.pages.host_hits
            for sequence in cache._table.sequences():
                cache.remove_sequence(sequence)
            assert snapshots.num_held == 0
            cache.clear_prefixes()
            assert cache.room(30).free == cache.room(30).total


@pytest.mark.gate("1-3")
@pytest.mark.parametrize("most", [1, 3, 30])
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_programs_equal_states_from_the_first_token(seed: int, most: int) -> None:
    """Also with few pages for snapshots: these are evicted, and what is not found is computed. With odd seeds a store
    keeps them."""
    program = Program(Random(seed), island_of(5, most))
    if seed % 2:
        program.keep_evicted()
    program.run(300)
    assert program.done["found"]
    if most == 3:
        assert bool(program.done["from the host"]) == bool(seed % 2)
    if most == 30:
        wanted = ("forks within", "pops within", "sent behind a prefix", "between")
        assert all(program.done[name] for name in wanted), program.done
    else:
        assert program.done["evicted"]


def cache_of(most: int = 20, own: int = 8) -> TvmCache:
    return island_of(own, most).caches[0]


def with_prompt(cache: TvmCache, sequence: int, tokens: list[int], chunks: list[int]) -> None:
    """Computes the chunks of a new sequence and publishes them."""
    cache.add_sequence(sequence)
    for count in chunks:
        forward(cache, {sequence: tokens}, {sequence: count})
    cache.publish_prefix(sequence, np.array(tokens[: sum(chunks)]))


def test_a_prefix_ends_with_the_last_snapshot_before_tokens_differ() -> None:
    """The 30 positions have snapshots at 8, 16 and 24, every 8, and at 28, the last full page."""
    cache, tokens = cache_of(), [token % VOCABULARY for token in range(60)]
    with_prompt(cache, 0, tokens, [30])
    for new, (alike, found) in enumerate([(30, 28), (28, 28), (27, 24), (24, 24), (20, 16), (16, 16), (7, 0)], 1):
        other = tokens[:alike] + [token + 1 for token in tokens[alike:40]]
        cache.add_sequence(new)
        assert cache.match_prefix(new, np.array(other)) == found
        forward(cache, {new: other}, {new: 3})
        cache.remove_sequence(new)
    cache.add_sequence(1)
    assert cache.match_prefix(1, np.array(tokens), b"salt") == 0


def test_single_tokens_leave_the_same_snapshots() -> None:
    """The last full page moves on, so that a decoded sequence holds a page for each 8 positions, and one."""
    cache, tokens = cache_of(), list(range(40))
    cache.add_sequence(0)
    forward(cache, {0: tokens}, {0: 3})
    snapshots = cache._pages.snapshots[1]
    assert snapshots is not None
    for _ in range(18):
        forward(cache, {0: tokens}, {0: 1})
    assert snapshots.positions(cache._table.row(0)) == [8, 16, 20]
    cache.publish_prefix(0, np.array(tokens[:21]))
    cache.remove_sequence(0)
    cache.add_sequence(1)
    assert cache.match_prefix(1, np.array(tokens[:22])) == 20
    forward(cache, {1: tokens}, {1: 2})


def test_a_sequence_without_free_pages_keeps_its_last_snapshots() -> None:
    cache, tokens = cache_of(most=2), list(range(50))
    cache.add_sequence(0)
    snapshots = cache._pages.snapshots[1]
    assert snapshots is not None
    for count in (16, 9, 1, 6, 8):  # 8 16, 8 16 24 (25), …
        forward(cache, {0: tokens}, {0: count})
        assert snapshots.num_held <= 2
    assert snapshots.positions(cache._table.row(0)) == [32, 40]
    cache.publish_prefix(0, np.array(tokens[:40]))
    assert (snapshots.num_held, snapshots.num_pages) == (0, 2)


def test_it_goes_back_to_states_that_are_there() -> None:
    cache, tokens = cache_of(), list(range(50))
    with_prompt(cache, 0, tokens, [30])
    message = "layer group 1 has no state there: it has states after 0, 8, 16, 24, 28, 30 positions"
    with pytest.raises(InvalidArgument, match="the fork would have 25 positions, but " + message):
        cache.fork_sequence(0, 1, 25)
    with pytest.raises(InvalidArgument, match="the sequence would have 29 positions, but " + message):
        cache.pop(0, 1)
    cache.fork_sequence(0, 1, 24)
    changed = {1: [*tokens[:24], 40, 41, 42]}
    forward(cache, changed, {1: 3})
    cache.pop(0, 14)
    forward(cache, {0: tokens}, {0: 5})
    with pytest.raises(InvalidArgument, match="it has states after 0, 8, 16, 20, 21 positions"):
        cache.pop(0, 2)
    cache.clear_prefixes()  # with them go the states that were in them
    with pytest.raises(InvalidArgument, match="it has states after 0, 20, 21 positions"):
        cache.pop(0, 5)


def test_a_snapshot_from_the_host_is_not_the_one_that_was_there() -> None:
    """It comes into the page of one that a sequence remembers, of other tokens."""
    cache, tokens, others = cache_of(most=1, own=1), list(range(20)), list(range(20, 40))
    keep_evicted(cache)
    with_prompt(cache, 0, others, [17])
    cache.remove_sequence(0)
    with_prompt(cache, 1, tokens, [17])
    snapshots, row = cache._pages.snapshots[1], cache._table.row(1)
    assert snapshots is not None
    page = snapshots.find(row, 16)
    assert page is not None
    cache._pools.prefixes.evict(1, 1)
    cache.add_sequence(2)
    assert cache.match_prefix(2, np.array(others)) == 0  # no page is left for a state of its own
    assert cache.pages.host_hits == 1
    assert cache._pools.prefixes.indexed[1][page]
    assert snapshots.find(row, 16) is None


def test_a_state_of_its_own_comes_before_a_snapshot() -> None:
    """If no page is free but the snapshot's, a sequence computes its prompt from the first token."""
    cache, tokens = cache_of(most=1, own=2), list(range(50))
    with_prompt(cache, 0, tokens, [17])
    cache.remove_sequence(0)
    for other in (1, 2):
        cache.add_sequence(other)
        cache.reserve(other, 20)
    cache.add_sequence(3)
    assert cache.room(20).free[1] == 1
    assert cache.match_prefix(3, np.array(tokens[:20])) == 0
    cache.reserve(3, 20)
    forward(cache, {3: tokens}, {3: 20})
    cache.add_sequence(4)
    with pytest.raises(OutOfPages):
        cache.reserve(4, 20)


def test_snapshots_stand_where_pages_end() -> None:
    with pytest.raises(InvalidArgument, match="every of snapshots is 6; it must be a multiple of page_size, 4"):
        TvmCache(
            LAYOUT,
            pools_of(LAYOUT, 8),
            max_sequences=2,
            max_sequence_length=64,
            rope=ROPE,
            writer=None,
            snapshots=SnapshotRule(6, 1),
        )


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_taken_out_of_states(rows: int) -> None:
    """Any number of drafts is accepted, and what follows is as if the others had never been there."""
    random, cache = Random(rows), island_of(8, 20, drafted=3).caches[0]
    tokens = {row: [random.randrange(VOCABULARY) for _ in range(60)] for row in range(rows)}
    others = {row: [random.randrange(VOCABULARY) for _ in range(60)] for row in range(rows)}
    for row in range(rows):
        cache.add_sequence(row)
        forward(cache, tokens, {row: 5 + row})
    for turn in range(9):
        appends = {row: random.randint(1, 5) for row in range(rows)}
        held = {row: random.randint(1, count) for row, count in appends.items()}
        begins = {row: cache.num_tokens(row) for row in range(rows)}
        drafted = {row: tokens[row][: begins[row] + held[row]] + others[row][:10] for row in range(rows)}
        forward(cache, drafted, appends, drafted=True)
        for row in range(rows):
            cache.pop(row, appends[row] - held[row])
        if turn % 3 == 0:
            forward(cache, tokens, dict.fromkeys(range(rows), 2))
    length = cache.num_tokens(0)
    cache.publish_prefix(0, np.array(tokens[0][:length]))
    cache.add_sequence(9)
    found = cache.match_prefix(9, np.array(tokens[0]))
    assert found == length // PAGE * PAGE
    forward(cache, {9: tokens[0]}, {9: 3})


def test_states_before_drafts_have_pages() -> None:
    cache, tokens = island_of(8, 0, drafted=1).caches[0], list(range(40))
    for sequence in (0, 1):
        cache.add_sequence(sequence)
        forward(cache, {sequence: tokens}, {sequence: 6})
    with pytest.raises(InvalidArgument, match="append_lengths has 2 sequences with drafts; it may have at most 1"):
        cache.begin(Batch((0, 1), (2, 2), drafted=True))
    forward(cache, {1: tokens}, {1: 5}, drafted=True)
    cache.pop(1, 4)
    cache.pop(1, 1)
    forward(cache, {1: tokens}, {1: 2})
    with pytest.raises(InvalidArgument, match="it has states after 0, 8 positions"):
        cache.pop(1, 1)
    assert cache.room(4).total[1] == 8


def test_positions_that_were_taken_back_leave_no_snapshot() -> None:
    cache, tokens = cache_of(), list(range(40))
    cache.add_sequence(0)
    forward(cache, {0: tokens}, {0: 20})
    cache.pop(0, 12)
    other = {0: tokens[:8] + tokens[20:40]}
    forward(cache, other, {0: 11})
    cache.fork_sequence(0, 1, 16)
    forward(cache, {1: other[0]}, {1: 2})
    cache.pop(0, 3)
    forward(cache, other, {0: 2})


def test_drafters_grow_sequences_without_their_states() -> None:
    """Forwards of other layers alone, which are popped: then the state stands where it did."""
    cache, tokens = cache_of(), list(range(40))
    cache.add_sequence(0)
    forward(cache, {0: tokens}, {0: 7})
    kv = torch.zeros(1, 2, HEAD_DIM)
    for _ in range(3):
        plan = cache.begin(Batch([0], push=False, without_states=True))
        plan.attention.attend(1, kv, kv, kv)
        cache.commit(plan, range(1, 2))
    with pytest.raises(InvalidArgument, match="sequence 0 has grown without its states, from 7 positions on; pop"):
        cache.begin_forward([0], [1])
    with pytest.raises(InvalidArgument, match="the sequence would have 8 positions, but layer group 1 has no state"):
        cache.pop(0, 2)
    cache.pop(0, 3)
    forward(cache, {0: tokens}, {0: 1})
    forward(cache, {0: tokens}, {0: 4})
