"""Arguments that TvmCache must not take: each is refused by name, and nothing has changed."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import (
    LATENT_HEADS,
    MAX_LENGTH,
    cache_of,
    draw_inputs,
    layout_of,
    pools_of,
    ropes_of,
    run,
    up_projections,
)
from tests.cache.peer_writer import PeerWriter
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2)
LATENTS = KVLayout((LayerGroup((0,), Latent(12, 8)),), 4, torch.float32)
NO_BATCH: Any = None  # none is looked at before the sequences are
NO_INTEGERS = [1.0, 2.5, float("nan"), "1", None, True, [1], np.float64(2), 1 << 70]

Call = Callable[[TvmCache, Any], object]
SCALARS: dict[str, tuple[str, Call]] = {
    "a new sequence": ("sequence", lambda cache, value: cache.add_sequence(value)),
    "a child": ("sequence", lambda cache, value: cache.fork_sequence(0, value)),
    "position": ("position", lambda cache, value: cache.fork_sequence(0, 9, value)),
    "num_tokens": ("num_tokens", lambda cache, value: cache.reserve(0, value)),
    "room": ("num_tokens", lambda cache, value: cache.room(value)),
    "window": ("window", lambda cache, value: cache.enable_sliding_window(2, value, 0)),
    "sink": ("sink", lambda cache, value: cache.enable_sliding_window(2, 8, value)),
    "length": ("length", lambda cache, value: cache.prepare_receive(0, value)),
    "begin": ("begin", lambda cache, value: cache.gather_kv(0, value, 3)),
    "end": ("end", lambda cache, value: cache.gather_kv(0, 0, value)),
    "group": ("group", lambda cache, value: cache.gather_group(0, value, 0, 3)),
}
ROWS: dict[str, Call] = {
    "append_lengths": lambda cache, value: cache.begin_forward([0], [value]),
    "rope_lengths": lambda cache, value: cache.begin_forward([0], [1], rope_lengths=[value]),
    "leaf_indices": lambda cache, value: cache.commit_token_tree([1], [value]),
    "token_ids": lambda cache, value: cache.match_prefix(2, [value] * 5),
    "token_ids of no page": lambda cache, value: cache.match_prefix(2, [value]),
    "token_ids to publish": lambda cache, value: cache.publish_prefix(0, [value] * 5),
    "token_tree_parents[0]": lambda cache, value: cache.begin_forward([0], [1], token_tree_parents=[[value]]),
}


def filled(**options: Any) -> TvmCache:
    """Sequence 0 has 5 positions, 1 has 3 and an open tree of 2 nodes, 2 is empty."""
    cache = cache_of(LAYOUT, **options)
    for sequence in range(3):
        cache.add_sequence(sequence)
    run(cache, [0, 1], [5, 3], draw_inputs(LAYOUT, 8, seed=0))
    run(cache, [1], [2], draw_inputs(LAYOUT, 2, seed=1), parents=[[-1, 0]])
    return cache


def state_of(cache: TvmCache) -> object:
    table = cache._table
    pages = [group.pages.tolist() for group in table.groups]
    return table.lengths.tolist(), table.sequences(), table.receiving.tolist(), pages, cache._pools.num_free


def refuses(cache: TvmCache, call: Callable[[], object], message: str) -> None:
    before = state_of(cache)
    with pytest.raises(InvalidArgument, match=message):
        call()
    assert state_of(cache) == before


@pytest.mark.parametrize("value", NO_INTEGERS[:-1], ids=repr)
@pytest.mark.parametrize(("name", "call"), SCALARS.values(), ids=SCALARS.keys())
def test_what_is_no_integer(name: str, call: Call, value: Any) -> None:
    cache = filled()
    refuses(cache, lambda: call(cache, value), rf"^{name} is .*; it must be an integer")


@pytest.mark.parametrize("value", [*NO_INTEGERS, 1 << 63, [[1], 2]], ids=repr)
@pytest.mark.parametrize(("name", "call"), ROWS.items(), ids=ROWS.keys())
def test_rows_of_what_are_no_integers(name: str, call: Call, value: Any) -> None:
    cache, argument = filled(), re.escape(name.split()[0])
    refuses(cache, lambda: call(cache, value), rf"^{argument} is .*; it must be a row of integers of 64 bits")


@pytest.mark.parametrize("longest", [MAX_LENGTH + 1, (1 << 63) - 1])
@pytest.mark.parametrize("others", [[], [1], [2, 1]], ids=len)
def test_appends_that_no_sequence_can_hold(longest: int, others: list[int]) -> None:
    """The sum overflows, and would make this sequence the shortest of all."""
    cache = filled()
    cache.commit_token_tree([1], [-1])
    sequences = [0, 1, 2][: 1 + len(others)]
    message = f"append_lengths has {longest}; each must be from 1 to {MAX_LENGTH}"
    refuses(cache, lambda: cache.begin_forward(sequences, [longest, *others]), message)
    refuses(cache, lambda: cache.begin_forward(sequences[::-1], [*others, longest]), message)


@pytest.mark.parametrize(
    ("seq_ids", "message"),
    [
        (0, "seq_ids is 0; it must be a row"),
        (None, "seq_ids is None; it must be a row"),
        ([[0]], r"sequence \[0\] is not there"),
    ],
    ids=repr,
)
def test_rows_of_what_are_no_sequences(seq_ids: Any, message: str) -> None:
    cache = filled()
    refuses(cache, lambda: cache.begin_forward(seq_ids, [1]), message)
    refuses(cache, lambda: cache.commit_token_tree(seq_ids, [0]), message)
    refuses(cache, lambda: cache.foresee(NO_BATCH, seq_ids, []), message)


def test_only_sequences_that_are_received_are_foreseen() -> None:
    cache = filled()
    cache.prepare_receive(2, 3)
    for seq_ids in ([], [0], [2, 0]):
        refuses(
            cache,
            lambda ids=seq_ids: cache.foresee(NO_BATCH, ids, []),
            re.escape(f"seq_ids is {seq_ids}; all have to be"),
        )


def test_trees_of_nobody() -> None:
    cache, none = filled(), 5
    refuses(
        cache,
        lambda: cache.begin_forward([0], [1], token_tree_parents=none),  # type: ignore[arg-type]
        "token_tree_parents is 5; it must have an entry for each sequence",
    )


def test_groups_that_are_not_there() -> None:
    cache = filled()
    for group in (-1, 1):
        refuses(
            cache, lambda group=group: cache.gather_group(0, group, 0, 3), f"group is {group}; it must be from 0 to 0"
        )


def test_reservations_below_nothing() -> None:
    cache = filled()
    half: Any = 2.5
    calls: tuple[Callable[..., object], ...] = (
        cache.room,
        lambda *sizes: cache.reserve(0, *sizes),
    )
    for call in calls:
        refuses(cache, lambda call=call: call(-1), "num_tokens is -1; it must be at least 0")
        refuses(cache, lambda call=call: call(9, -1), "longest_append is -1; it must be at least 0")
        refuses(cache, lambda call=call: call(9, half), r"longest_append is 2\.5; it must be an integer")


class WriterOfTwo(PeerWriter):
    """A writer like a transport's whose island has two PEs."""

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        if not 0 <= pe < 2:
            raise InvalidArgument(f"pe is {pe}; it must be from 0 to 1")
        return None


def test_peers_that_are_not_there() -> None:
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    cache = filled(pools=pools[0], writer=WriterOfTwo(0, pools))
    asked = PositionMap(0, (SlotRuns.from_slots(range(9)),))
    half: Any = 0.5
    refuses(cache, lambda: cache.mark_send(0, 0, asked, half), r"target_pe is 0\.5; it must be an integer")
    for pe in (-1, 2):
        refuses(cache, lambda pe=pe: cache.mark_send(0, 0, asked, pe), f"pe is {pe}; it must be from 0 to 1")
    cache.begin_forward([0], [4])
    assert cache.sends_done(0)


def test_what_is_marked_does_not_begin_to_slide() -> None:
    """Its receiver, which was asked before, would take K for rotated."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    cache = filled(pools=pools[0], writer=PeerWriter(0, pools))
    cache.mark_send(2, 0, PositionMap(0, (SlotRuns.from_slots(range(9)),)), 1)
    refuses(cache, lambda: cache.enable_sliding_window(2, 8, 2), "sequence 2 is marked to be sent")
    run(cache, [2], [9], draw_inputs(LAYOUT, 9, seed=3))
    cache.pop(2, 9)
    cache.enable_sliding_window(2, 8, 2)


def test_what_has_not_landed_is_not_sent_on() -> None:
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    cache, asked = filled(pools=pools[0], writer=PeerWriter(0, pools)), PositionMap(0, (SlotRuns.from_slots(range(3)),))
    cache.prepare_receive(2, 3)
    cache.mark_send(2, 0, asked, 1)
    refuses(cache, lambda: cache.send_cached(2), "sequence 2 is being received; finish_receive ends that")
    assert cache.num_sent(2) == 0
    cache.finish_receive(2)
    cache.send_cached(2)
    assert cache.sends_done(2)


def test_maps_of_nothing() -> None:
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    cache, nothing = filled(pools=pools[0], writer=PeerWriter(0, pools)), PositionMap(0, (SlotRuns.from_slots([]),))
    refuses(
        cache, lambda: cache.mark_send(2, 0, nothing, 1), "the position map has no positions; it must have at least 1"
    )


def test_maps_that_cannot_be() -> None:
    ones = np.ones(1)
    with pytest.raises(InvalidArgument, match="begins is float64 and lengths float64; both must be int32"):
        SlotRuns(ones, ones)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"start_position is 1\.5; it must be an integer"):
        PositionMap(1.5, (SlotRuns.from_slots([0]),))  # type: ignore[arg-type]


INPUTS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]]] = {
    "tokens of q": ("q", lambda q, k, v: (q[:2], k, v)),
    "tokens of k": ("k", lambda q, k, v: (q, k[:2], v)),
    "tokens of v": ("v", lambda q, k, v: (q, k, torch.cat((v, v)))),
    "width of q": ("q", lambda q, k, v: (q[..., 1:], k, v)),
    "width of k": ("k", lambda q, k, v: (q, k[..., 1:], v)),
    "width of v": ("v", lambda q, k, v: (q, k, v[..., 1:])),
    "heads of k": ("k", lambda q, k, v: (q, k[:, :1], v)),
    "heads of k and v": ("k", lambda q, k, v: (q, k[:, :1], v[:, :1])),
    "heads of q": ("q has 3 heads; it must have a multiple of", lambda q, k, v: (q[:, :3], k, v)),
    "no heads of q": ("q has 0 heads; it must have a multiple of", lambda q, k, v: (q[:, :0], k, v)),
    "flat q": ("q", lambda q, k, v: (q.flatten(1), k, v)),
    "dtype of q": ("q", lambda q, k, v: (q.bfloat16(), k, v)),
    "dtype of k": ("k", lambda q, k, v: (q, k.double(), v)),
    "dtype of all": ("q", lambda q, k, v: (q.half(), k.half(), v.half())),
    "device of q": ("q", lambda q, k, v: (q.to("meta"), k, v)),
    "device of v": ("v", lambda q, k, v: (q, k, v.to("meta"))),
    "strides of q": ("q", lambda q, k, v: (q.transpose(0, 2).contiguous().transpose(0, 2), k, v)),
    "one sink": ("sinks", lambda q, k, v: (q, k, v, torch.zeros(1))),
    "no row of sinks": ("sinks", lambda q, k, v: (q, k, v, torch.zeros(4, 1))),
    "sinks of integers": ("sinks", lambda q, k, v: (q, k, v, torch.zeros(4, dtype=torch.int64))),
    "device of sinks": ("sinks", lambda q, k, v: (q, k, v, torch.zeros(4, device="meta"))),
}


@pytest.mark.parametrize("lengths", [[3], [1, 1, 1]], ids=["prompt", "decode"])
@pytest.mark.parametrize(("message", "change"), INPUTS.values(), ids=INPUTS.keys())
def test_tensors_that_do_not_fit(
    message: str, change: Callable[..., tuple[Tensor, Tensor, Tensor]], lengths: list[int]
) -> None:
    pools = pools_of(LAYOUT, 8)
    cache = cache_of(LAYOUT, pools=pools)
    for sequence in range(len(lengths)):
        cache.add_sequence(sequence)
    plan = cache.begin_forward(list(range(len(lengths))), lengths)
    refuses(
        cache,
        lambda: cache.attention(plan, 0, *change(*draw_inputs(LAYOUT, 3, seed=0).layers[0])),
        f"^{message} ",
    )
    assert all(pool.isnan().all() for pool in pools)


@pytest.mark.parametrize("changed", range(4), ids=["q", "latents", "keys", "up.weight"])
def test_latents_that_do_not_fit(changed: int) -> None:
    cache = cache_of(LATENTS, rope=ropes_of(LATENTS))
    cache.add_sequence(0)
    plan, up = cache.begin_forward([0], [3]), up_projections(8)
    q, entries, latents = draw_inputs(LATENTS, 3, seed=0).layers[0]
    given = (q, latents[:, 0], entries[:, 0, 8:], up.weight)
    name = ("q", "latents", "keys", "up.weight")[changed]
    for change in (torch.Tensor.half, lambda x: x[:2], lambda x: x[..., 1:], lambda x: x.to("meta")):
        q, latents, keys, weight = (change(x) if index == changed else x for index, x in enumerate(given))
        with pytest.raises(InvalidArgument, match=rf"^({name}|q) is \("):  # with fewer maps, q has too many heads
            cache.latent_attention(plan, 0, q, latents, keys, UpProjections(weight, LATENT_HEADS))
    q, latents, keys, weight = given
    with pytest.raises(InvalidArgument, match=r"^up\.heads is"):
        cache.latent_attention(plan, 0, q, latents, keys, UpProjections(weight, LatentHeads(7, 7)))


PLANS: dict[str, Callable[[TvmCache], object]] = {
    "popped": lambda cache: cache.pop(0, 1),
    "removed": lambda cache: cache.remove_sequence(0),
    "cleared": lambda cache: cache.clear(),
    "another instead": lambda cache: (cache.clear(), cache.add_sequence(0), cache.begin_forward([0], [7])),
}


@pytest.mark.parametrize("change", PLANS.values(), ids=PLANS.keys())
def test_a_plan_of_what_is_gone(change: Callable[[TvmCache], object]) -> None:
    """Its pages may be others' by now."""
    cache = filled()
    plan, (q, k, v) = cache.begin_forward([0], [2]), draw_inputs(LAYOUT, 2, seed=2).layers[0]
    change(cache)
    refuses(cache, lambda: cache.attention(plan, 0, q, k, v), "a sequence that was shortened or removed since")


def test_a_plan_outlives_what_happens_to_others() -> None:
    cache, untouched = filled(), filled()
    inputs = draw_inputs(LAYOUT, 2, seed=2).layers
    plans = [of.begin_forward([0], [2]) for of in (cache, untouched)]
    cache.commit_token_tree([1], [0])
    cache.remove_sequence(2)
    with torch.inference_mode():
        for layer, given in enumerate(inputs):
            one, other = (of.attention(plan, layer, *given) for of, plan in zip((cache, untouched), plans, strict=True))
            assert torch.equal(one, other)


def test_a_plan_of_another_cache() -> None:
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    cache, other = (filled(pools=pools[pe], writer=PeerWriter(pe, pools)) for pe in range(2))
    (q, k, v), plans = draw_inputs(LAYOUT, 2, seed=2).layers[0], []
    for one in (cache, other):
        one.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(range(9)),)), 1)
        plans.append(one.begin_forward([0], [2]))
    refuses(cache, lambda: cache.attention(plans[1], 0, q, k, v), "the forward is of another cache")
    refuses(cache, lambda: cache.end_forward(plans[1]), "the forward is of another cache")
    assert cache.num_sent(0) == 0


@pytest.mark.parametrize("name", ["page_size", "num_kv_heads", "head_dim", "layers", "rank", "still", "top_k"])
@pytest.mark.parametrize("value", [8.0, "8", True], ids=repr)
def test_layouts_are_of_integers(name: str, value: Any) -> None:
    given: dict[str, Any] = {"layers": 0, "num_kv_heads": 1, "head_dim": 12, "rank": 8, "still": 6, "top_k": 5}
    given[name], page_size = value, value if name == "page_size" else 4
    groups = (
        LayerGroup((given["layers"],), KV(given["num_kv_heads"], given["head_dim"])),
        LayerGroup((1,), Latent(12, given["rank"])),
        LayerGroup((1,), IndexKeys(10, given["still"], given["top_k"])),
    )
    with pytest.raises(InvalidArgument, match=r" is .*; it must be an integer"):
        KVLayout(groups, page_size, torch.float32)


@pytest.mark.parametrize("name", ["max_sequences", "max_sequence_length"])
@pytest.mark.parametrize("value", [0, -1, 2.0, None], ids=repr)
def test_caches_are_of_integers(name: str, value: Any) -> None:
    sizes: dict[str, Any] = {"max_sequences": 2, "max_sequence_length": 9, name: value}
    with pytest.raises(InvalidArgument, match=f"{name} is {value}; "):
        TvmCache(LAYOUT, pools_of(LAYOUT, 4), rope=RopeParameters("none", 0), writer=None, **sizes)
