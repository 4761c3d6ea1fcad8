"""The states of recurrent layers: their rules in chunks and token by token, and their pages in random programs."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention import page_look_up
from tandem.cache.digest import digest_kv
from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, RecurrentInputs, SsdShape, StateShape
from tandem.cache.kernels.torch.causal_conv import chunk_conv, step_conv
from tandem.cache.kernels.torch.delta_rule import chunk_delta_rule, step_delta_rule, unit
from tandem.cache.kernels.torch.kda import chunk_kda
from tandem.cache.kernels.torch.ssd import chunk_ssd, step_ssd
from tandem.cache.kinds.kind import check_gpu
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.pages import step_growth
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import PageUse, num_pages_in, pages_of_groups
from tandem.cache.plan.position_map import SKIP
from tandem.transfer.errors import InvalidPositionMap
from tandem.transfer.wire_map import decode_map, encode_map
from tests.cache.island import Island
from tests.cache.naive import HEAD_DIM
from tests.support.naive_states import naive_conv, naive_delta_rule, naive_outputs, naive_ssd
from tests.support.tvm_cache import TvmCache

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=5, value_dim=3, tail=3)
KDA = KdaShape(key_heads=3, value_heads=3, key_dim=4, value_dim=4, tail=3)
SSD = SsdShape(num_heads=4, groups=2, head_dim=3, state_size=5, tail=2)


def layout_of(shape: StateShape) -> KVLayout:
    groups = LayerGroup((1,), KV(2, HEAD_DIM)), LayerGroup((0, 2), Recurrent(shape))
    return KVLayout(groups, page_size=4, dtype=torch.float32)


LAYOUT = layout_of(SHAPE)
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def random_heads(count: int, seed: int) -> tuple[Tensor, ...]:
    """q, k, v, log_decay, beta of `count` tokens, and a state."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (unit(torch.randn(count, 4, 5, generator=generator)) for _ in range(2))
    v, g, beta = (torch.randn(count, 4, *size, generator=generator) for size in ((3,), (), ()))
    state = torch.randn(4, 5, 3, generator=generator)
    return q, k, v, -g.abs() * 2, beta.sigmoid(), state


def random_rows(count: int, seed: int) -> tuple[Tensor, ...]:
    """Draws like random_heads, but with a decay for each row of a state. Some decays leave nothing."""
    q, k, v, _, beta, state = random_heads(count, seed)
    decay = torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(seed)).exp() * 5
    return q, k, v, -decay, beta, state


def random_groups(count: int, seed: int) -> tuple[Tensor, ...]:
    """x, B, C, log_decay, Δ of `count` tokens, and a state."""
    generator = torch.Generator().manual_seed(seed)
    x, b, c, g, delta = (
        torch.randn(count, *size, generator=generator) for size in ((6, 3), (2, 5), (2, 5), (6,), (6,))
    )
    return x, b, c, -g.abs() * 2, delta.abs(), torch.randn(6, 3, 5, generator=generator)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize(
    ("given", "naive", "chunk", "step"),
    [
        (random_heads, naive_delta_rule, chunk_delta_rule, step_delta_rule),
        (random_rows, naive_delta_rule, chunk_kda, step_delta_rule),
        (random_groups, naive_ssd, chunk_ssd, step_ssd),
    ],
    ids=["delta", "kda", "ssd"],
)
def test_the_chunk_form_gives_what_single_tokens_give(
    given: Any, naive: Any, chunk: Any, step: Any, count: int
) -> None:
    *tokens, state = given(count, seed=count)
    expected, behind = naive(*tokens, state)
    output, new_state = chunk(*tokens, state)
    torch.testing.assert_close(output.double(), expected, **TOLERANCE)
    torch.testing.assert_close(new_state.double(), behind, **TOLERANCE)
    states, steps = state.unsqueeze(0), []
    for at in range(count):
        one, states = step(*(x[at : at + 1] for x in tokens), states)
        steps.append(one)
    torch.testing.assert_close(torch.cat(steps).double(), expected, **TOLERANCE)
    torch.testing.assert_close(states[0].double(), behind, **TOLERANCE)


@pytest.mark.parametrize(("cuts", "biased"), [([1], False), ([3, 4], True), ([2, 40, 41], True)])
def test_a_convolution_goes_on_where_its_tail_ends(cuts: list[int], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 6, generator=generator), torch.randn(6, 4, generator=generator)
    bias = torch.randn(6, generator=generator) if biased else None
    expected = naive_conv(x, weight, bias).float()
    tail, outputs = torch.zeros(3, 6), []
    for piece in torch.tensor_split(x, cuts):
        if piece.shape[0] == 1:
            output, tails = step_conv(piece, tail.unsqueeze(0), weight, bias)
            tail = tails[0]
        else:
            output, tail = chunk_conv(piece, tail, weight, bias)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), expected, **TOLERANCE)
    assert torch.equal(tail, x[-3:])


def inputs_of(count: int, seed: int, shape: StateShape = SHAPE) -> RecurrentInputs:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, shape.channels, generator=generator)
    log_decay = torch.randn(count, *shape.decays, generator=generator)
    strength = torch.randn(count, shape.heads, generator=generator)
    constants = torch.Generator().manual_seed(99)
    conv, bias, skip = (
        torch.randn(size, generator=constants)
        for size in ((shape.channels, shape.tail + 1), (shape.channels,), (shape.heads,))
    )
    own = {"conv_bias": bias, "skip": skip} if isinstance(shape, SsdShape) else {}
    return RecurrentInputs(mixed, conv, -log_decay.abs(), strength.sigmoid(), **own)


class NaiveStates:
    """Keeps each sequence's inputs from its first token on, and computes all of them anew each time."""

    def __init__(self, shape: StateShape = SHAPE) -> None:
        self.shape = shape
        self.history: dict[int, list[RecurrentInputs]] = {}

    def outputs(self, sequence: int, x: RecurrentInputs) -> Tensor:
        self.history[sequence].append(x)
        return naive_outputs(self.shape, join(self.history[sequence]))[-x.mixed.shape[0] :]


def join(parts: list[RecurrentInputs]) -> RecurrentInputs:
    names = ("mixed", "log_decay", "strength")
    return parts[0]._replace(**{name: torch.cat([getattr(one, name) for one in parts]) for name in names})


def run_forward(cache: TvmCache, naive: NaiveStates, counts: dict[int, int], seed: int, *, push: bool = True) -> None:
    """Runs one forward. Both recurrent layers' outputs equal the naive states'."""
    given = {sequence: inputs_of(count, seed + sequence, naive.shape) for sequence, count in counts.items()}
    total, x = sum(counts.values()), join(list(given.values()))
    with torch.inference_mode():
        plan = cache.begin_forward(list(counts), list(counts.values()), push=push)
        outputs = plan.attention.recur(0, x).clone()
        kv = torch.randn(total, 2, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
        plan.attention.attend(1, kv, kv, kv)
        again = plan.attention.recur(2, x)
        cache.commit(plan)
    expected = torch.cat([naive.outputs(sequence, one) for sequence, one in given.items()])
    torch.testing.assert_close(outputs.double(), expected, **TOLERANCE)
    torch.testing.assert_close(again.double(), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("seed", "native", "shape"), [(0, True, SHAPE), (1, True, SSD), (2, True, KDA), (3, False, SSD)]
)
def test_random_programs_equal_naive_states(
    seed: int, native: bool, shape: StateShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """native: with C that plans page tables, where that can be built."""
    if not native:
        for module in (page_look_up, step_growth):
            monkeypatch.setattr(module, "load_short_calls", lambda source: None)
    random, layout = Random(seed), layout_of(shape)
    island = Island.of(layout, num_pages=40)
    sender, receiver = island.caches
    naive, done = NaiveStates(shape), {"forks": 0, "sends": 0, "staged": 0}
    held: dict[int, list[int]] = {0: [], 1: []}
    fresh = iter(range(1000))
    for turn in range(60):
        cache, ids = island.caches[turn % 2], held[turn % 2]
        action = random.choice(["add", "forward", "forward", "fork", "send", "remove"])
        if action == "add" and len(ids) < 4:
            ids.append(new := next(fresh))
            cache.add_sequence(new)
            if random.random() < 0.5:
                cache.reserve(new, 30)
            naive.history[new] = []
        elif action == "forward" and ids:
            chosen = random.sample(ids, random.randint(1, len(ids)))
            counts = {one: random.choice([1, 1, 2, 5, 9]) for one in chosen if cache.num_tokens(one) < 45}
            if counts:
                run_forward(cache, naive, counts, turn * 100)
        elif action == "fork" and ids and len(ids) < 4:
            ids.append(child := next(fresh))
            parent = random.choice(ids[:-1])
            cache.fork_sequence(parent, child)
            naive.history[child] = list(naive.history[parent])
            done["forks"] += 1
        elif action == "send" and turn % 2 == 0 and len(held[1]) < 4:
            count, staged = random.randint(2, 12), random.random() < 0.5
            sequence, pieces = next(fresh), sorted({random.randint(1, count - 1), count})
            naive.history[sequence] = []
            sender.add_sequence(sequence)
            receiver.add_sequence(sequence)
            wanted = receiver.prepare_receive(sequence, count)
            sent = decode_map(
                encode_map(wanted, layout), layout, num_pages=(40, 40), expected_start=0, expected_tokens=count
            )
            assert sent == wanted
            assert wanted.runs[1].slots().tolist()[:-1] == [SKIP] * (count - 1)
            if staged:
                sender.mark_send(sequence, 0, sent, 1)
            for begin, end in zip([0, *pieces], pieces, strict=False):
                run_forward(sender, naive, {sequence: end - begin}, turn * 100 + begin, push=random.random() < 0.7)
            if not staged:
                sender.mark_send(sequence, 0, sent, 1)
            sender.send_cached(sequence)
            digests = [digest_kv(one, sequence, 0, count) for one in (sender, receiver)]
            assert digests[0] == digests[1]
            assert sender.sends_done(sequence)
            receiver.finish_receive(sequence)
            sender.remove_sequence(sequence)
            held[1].append(sequence)
            done["sends"] += 1
            done["staged"] += staged
        elif action == "remove" and ids:
            cache.remove_sequence(ids.pop(random.randrange(len(ids))))
    assert done["forks"]
    assert done["sends"]
    writes = [write for write in island.writer.slot_writes if write[1] == 1 and write[2]]
    assert len(writes) == done["sends"]  # once each, after the last chunk
    for cache in island.caches:
        cache.clear()
        assert cache.num_free_pages == cache.num_pages
        assert cache.room(30).free[1] == 40


def test_a_state_is_only_where_a_sequence_ends() -> None:
    cache, naive = Island.of(LAYOUT).caches[0], NaiveStates()
    naive.history = {0: [], 1: []}
    cache.add_sequence(0)
    run_forward(cache, naive, {0: 6}, 0)
    with pytest.raises(InvalidArgument, match="the fork would have 5 positions, but layer group 1 has no state there"):
        cache.fork_sequence(0, 1, 5)
    with pytest.raises(
        InvalidArgument, match=r"the sequence would have 4 positions.* it has states after 0, 6 positions"
    ):
        cache.pop(0, 2)
    assert 1 not in cache._table
    run_forward(cache, naive, {0: 1}, 1)
    cache.pop(0, 7)  # of all its positions nothing is left, and a sequence may begin anew
    naive.history[0] = []
    run_forward(cache, naive, {0: 3}, 2)


def test_a_state_is_sent_before_it_changes() -> None:
    island = Island.of(LAYOUT)
    sender, receiver = island.caches
    naive = NaiveStates()
    naive.history = {0: [], 1: []}
    for sequence in (0, 1):
        sender.add_sequence(sequence)
        receiver.add_sequence(sequence)
    wanted = receiver.prepare_receive(0, 4)
    run_forward(sender, naive, {0: 3}, 0)
    sender.mark_send(0, 0, wanted, 1)
    with pytest.raises(InvalidArgument, match="sequence 0 is to send its state behind 4 positions, and would grow"):
        sender.begin_forward([0], [2])
    run_forward(sender, naive, {0: 1}, 1)
    run_forward(sender, naive, {0: 2}, 2)  # it went with the forward before
    wanted = receiver.prepare_receive(1, 4)
    run_forward(sender, naive, {1: 5}, 3)
    with pytest.raises(InvalidArgument, match="the position map ends at 4, but sequence 1 has the state after 5 pos"):
        sender.mark_send(1, 0, wanted, 1)


def test_maps_that_ask_for_other_states_are_refused() -> None:
    receiver = Island.of(LAYOUT).caches[1]
    receiver.add_sequence(0)
    wire = encode_map(receiver.prepare_receive(0, 4), LAYOUT)
    all_states = replace(wire, runs=(wire.runs[0], wire.runs[0]))
    with pytest.raises(InvalidPositionMap, match=r"runs\[1\] skips 0 positions; it must skip the first 3 and no oth"):
        decode_map(all_states, LAYOUT, num_pages=(24, 24), expected_start=0, expected_tokens=4)


def test_without_snapshots_no_prefix_has_a_state() -> None:
    cache, naive, tokens = Island.of(LAYOUT).caches[0], NaiveStates(), np.arange(12)
    naive.history = {0: []}
    cache.add_sequence(0)
    run_forward(cache, naive, {0: 12}, 0)
    cache.publish_prefix(0, tokens)
    cache.add_sequence(1)
    assert cache.match_prefix(1, tokens) == 0
    assert cache.num_cached_pages == 0


def test_each_sequence_takes_one_page_of_states() -> None:
    uses = (PageUse(5, 100, 8), PageUse(2, 100, 64))
    assert pages_of_groups(LAYOUT, 300, uses) == (300, 7)
    assert LAYOUT.token_bytes == 2 * 2 * HEAD_DIM * 4
    states = LAYOUT.page_bytes(1)
    assert states == 2 * SHAPE.numbers * 4
    assert num_pages_in(LAYOUT, 7 * states + 100 * LAYOUT.page_bytes(0), uses) == 100
    cache = Island.of(LAYOUT, num_pages=3).caches[0]
    for sequence in range(3):
        cache.add_sequence(sequence)
        cache.reserve(sequence, 4)
    cache.add_sequence(3)
    assert cache.room(0).needed == (0, 0)
    assert cache.room(4).needed == (1, 1)
    assert cache.room(4).free[1] == 0
    with pytest.raises(OutOfPages):
        cache.reserve(3, 1)


def test_what_a_group_of_states_refuses() -> None:
    states, kv = LayerGroup((0,), Recurrent(SHAPE)), LayerGroup((1,), KV(2, HEAD_DIM))
    with pytest.raises(
        InvalidArgument, match="group 0 keeps states; the first group must have an entry for each position"
    ):
        KVLayout((states, kv), 4, torch.float32)
    with pytest.raises(InvalidArgument, match="value_heads of group 1 is 3; it must be a multiple of key_heads, 2"):
        KVLayout((kv, replace(states, kind=Recurrent(replace(SHAPE, value_heads=3)))), 4, torch.float32)
    check_gpu(LAYOUT, None)
    wide = replace(states, kind=Recurrent(replace(SHAPE, value_dim=129)))
    with pytest.raises(InvalidArgument, match="value_dim of group 1 is 129; on a GPU it must be at most 128"):
        check_gpu(replace(LAYOUT, groups=(kv, wide)), None)
    with pytest.raises(InvalidArgument, match="state_size of group 1 is 130; on a GPU it must be at most 128"):
        check_gpu(layout_of(replace(SSD, state_size=130)), None)
    with pytest.raises(InvalidArgument, match="key_heads of group 1 is 1; on a GPU it must be value_heads, 3, where"):
        check_gpu(layout_of(replace(KDA, key_heads=1)), None)
    for shape in (KDA, SSD):
        check_gpu(layout_of(shape), None)
    cache = Island.of(LAYOUT).caches[0]
    cache.add_sequence(0)
    with pytest.raises(InvalidArgument, match="the layout has groups with states; sequences slide only in layouts"):
        cache.enable_sliding_window(0, 8, 2)
    with pytest.raises(InvalidArgument, match="takes no token trees"):
        cache.begin_forward([0], [2], token_tree_parents=[[-1, 0]])
    attention = cache.begin_forward([0], [2]).attention
    with pytest.raises(InvalidArgument, match=r"mixed is \(3, 32\).* \(2, 32\) of torch.float32"):
        attention.recur(0, inputs_of(3, 0))
    with pytest.raises(InvalidArgument, match="num_heads of group 1 is 5; it must be a multiple of groups, 2"):
        layout_of(replace(SSD, num_heads=5))
    cache = Island.of(layout_of(SSD)).caches[0]
    cache.add_sequence(0)
    attention = cache.begin_forward([0], [2]).attention
    with pytest.raises(InvalidArgument, match=r"skip is \(3,\).* \(4,\) of torch.float32"):
        attention.recur(0, inputs_of(2, 0, SSD)._replace(skip=torch.ones(3)))
    kinds = SHAPE, replace(SHAPE, tail=4), replace(SHAPE, key_dim=3, value_dim=5), SSD
    layouts = [replace(LAYOUT, groups=(kv, replace(states, kind=Recurrent(one)))) for one in kinds]
    assert len({layout.fingerprint for layout in layouts}) == len(kinds)


def test_layers_that_keep_nothing_do_not_attend() -> None:
    """A model's feed-forward layers stand between the others; the layers that keep something count as complete."""
    groups = LayerGroup((3,), KV(2, HEAD_DIM)), LayerGroup((1, 4), Recurrent(SSD))
    layout = KVLayout(groups, page_size=4, dtype=torch.float32, keepless=(0, 2, 5))
    assert layout.num_layers == 6
    assert layout.fingerprint != replace(layout, keepless=(0, 2, 5, 6)).fingerprint
    cache = Island.of(layout).caches[0]
    cache.add_sequence(0)
    with torch.inference_mode():
        plan = cache.begin_forward([0], [2])
        with pytest.raises(InvalidArgument, match="layer is 2; it must be one of 1, 3, 4"):
            plan.attention.recur(2, inputs_of(2, 0, SSD))
        plan.attention.recur(1, inputs_of(2, 0, SSD))
        kv = torch.zeros(2, 2, HEAD_DIM)
        plan.attention.attend(3, kv, kv, kv)
        with pytest.raises(InvalidArgument, match=r"layers \[4\] of the plan never ran"):
            plan.attention.check_complete()
        plan.attention.recur(4, inputs_of(2, 0, SSD))
        cache.commit(plan)
    for keepless in ((), (0, 5), (0, 2, 3), (0, 2, 2)):
        with pytest.raises(InvalidArgument, match=r"each of 0 … n-1 must stand in exactly one group"):
            replace(layout, keepless=keepless)
