"""Combines every layout, heads and RoPE with each of the others, through all that is done to sequences. The outputs
equal those of the naive cache, or the call is refused."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import HEAD_DIM, Inputs, NaiveCache, cache_of, draw_inputs, layout_of, pools_of, run, windowed
from tests.cache.naive_trees import NaiveTrees
from tests.cache.peer_writer import PeerWriter
from tests.cache.sharing_kernels import sharing_all
from tests.support.kinds import has_latents
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

TWO = layout_of(2, 1)
LATENT = KVLayout((LayerGroup((1,), Latent(12, 8)), LayerGroup((0,), KV(2, HEAD_DIM))), 4, torch.float32)
FP8 = KVScales(((0.02,), (0.01,), (0.02,), (0.02,)), ((0.02, 0.03), (0.01,), (0.015,), (0.02,)))
LAYOUTS = {
    "K and V": TWO,
    "a window": windowed(TWO, None, 6),
    "two windows": windowed(TWO, 4, 9),
    "8 bits": replace(TWO, scales=FP8),
    "8 bits in windows": replace(windowed(TWO, 5, None), scales=FP8),
    "latents": LATENT,
}
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS},
    "all": {"softcap": 3.0, "scale": 0.2, "sinks": SINKS},
}
ROPES = {
    "none": RopeParameters("none", 0),
    "default": RopeParameters("default", HEAD_DIM, theta=100.0),
    "yarn": RopeParameters("yarn", HEAD_DIM, factor=2.0, original_max_position_embeddings=8),
    "dynamic": RopeParameters("dynamic", HEAD_DIM, factor=2.0, max_position_embeddings=8),
}
KERNELS = (choose_kernels, sharing_all(TorchKernels))
CASES = [  # each with each of the others, not all three with all
    pytest.param(LAYOUTS[layout], HEADS[heads], ROPES[rope], KERNELS[(i + j // 2) % 2], id=f"{layout}-{heads}-{rope}")
    for i, layout in enumerate(LAYOUTS)
    for j, heads in enumerate(HEADS)
    for k, rope in enumerate(ROPES)
    if k == (i + j) % len(ROPES)
]


@dataclass
class Twin:
    """A cache and the naive one. chunk: the most tokens of a forward, 1 where RoPE goes by the length of a sequence."""

    cache: TvmCache
    naive: NaiveCache
    chunk: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.trees = NaiveTrees(self.naive)

    def run(self, appends: dict[int, int | list[int]]) -> None:
        """Runs so many tokens of each sequence, or nodes with these parents, in as few forwards as possible."""
        if any(isinstance(of, list) for of in appends.values()) or max(appends.values()) <= self.chunk:  # type: ignore[type-var]
            self._forward(appends)
            return
        for sequence, count in appends.items():
            assert isinstance(count, int)
            for begin in range(0, count, self.chunk):
                self._forward({sequence: min(self.chunk, count - begin)})

    def _forward(self, appends: dict[int, int | list[int]]) -> None:
        lengths = [of if isinstance(of, int) else len(of) for of in appends.values()]
        parents = [None if isinstance(of, int) else of for of in appends.values()]
        inputs = self.draw(sum(lengths))
        actual = run(self.cache, list(appends), lengths, inputs, self.naive.sinks, parents)
        for own, expected in zip(actual, self.trees.run(list(appends), parents, lengths, inputs), strict=True):
            assert_close(own, expected)

    def draw(self, count: int) -> Inputs:
        self.seed += 1
        return draw_inputs(self.cache.layout, count, self.seed)

    def add(self, sequence: int) -> None:
        self.cache.add_sequence(sequence)
        self.naive.add(sequence)

    def fork(self, parent: int, child: int) -> None:
        self.cache.fork_sequence(parent, child)
        self.naive.fork(parent, child, self.cache.num_tokens(parent))

    def pop(self, sequence: int, count: int) -> None:
        self.cache.pop(sequence, count)
        self.naive.pop(sequence, count)


@pytest.mark.parametrize(("layout", "heads", "rope", "kernels"), CASES)
def test_each_with_each_of_the_others(
    layout: KVLayout, heads: dict[str, Any], rope: RopeParameters, kernels: KernelFactory
) -> None:
    heads, sinks = {name: value for name, value in heads.items() if name != "sinks"}, heads.get("sinks")
    options: dict[str, Any] = {**heads, "rope": ropes_of(layout, rope), "kernels": kernels}
    pools = [pools_of(layout, 40) for _ in range(2)]
    if has_latents(layout) and "softcap" in heads:
        with pytest.raises(InvalidArgument, match=r"softcap is .*; with latents it must be None"):
            cache_of(layout, pools=pools[0], **options)
        return
    sender, receiver = (cache_of(layout, pools=pools[pe], writer=PeerWriter(pe, pools), **options) for pe in range(2))
    naive = NaiveCache(layout, options["rope"], sinks=None if has_latents(layout) else sinks, **heads)
    twin = Twin(sender, naive, 1 if rope.by_length else 5)
    grow_fork_and_pop(twin)
    open_trees(twin)
    share_a_prefix(twin)
    slide(twin, rope)
    twin.run({0: 1, 1: 1, 2: 1, 3: 1})
    send(twin, receiver)


def ropes_of(layout: KVLayout, rope: RopeParameters) -> list[RopeParameters]:
    """Returns the RoPE of each group. It rotates the shared part of latents."""
    widths = [group.kind.rotated or group.head_dim for group in layout.groups]
    return [rope if rope.rope_type == "none" else replace(rope, rotary_dim=width) for width in widths]


def grow_fork_and_pop(twin: Twin) -> None:
    for sequence in (0, 2):
        twin.add(sequence)
    twin.run({0: 9, 2: 3})
    twin.fork(0, 1)
    twin.run({1: 4, 0: 1})
    twin.pop(1, 1)
    twin.run({0: 1, 1: 1, 2: 1})


def open_trees(twin: Twin) -> None:
    twin.run({1: 1, 0: [-1, 0, 0, -1], 2: [-1, -1]})
    twin.run({0: [1, 4, 3], 1: 1})
    for sequence, leaf in ((0, 5), (2, -1)):
        twin.cache.commit_token_tree([sequence], [leaf])
        twin.trees.commit(sequence, leaf)
    twin.run({0: 1, 2: 1, 1: 1})


def share_a_prefix(twin: Twin) -> None:
    """Shares a prefix of sequence 1 in sequence 3."""
    ids = list(range(twin.cache.num_tokens(1)))
    twin.cache.add_sequence(3)
    twin.cache.publish_prefix(1, ids)
    matched = twin.cache.match_prefix(3, ids)
    assert matched >= 8
    twin.naive.fork(1, 3, matched)
    twin.run({3: 2})


def slide(twin: Twin, rope: RopeParameters) -> None:
    """As long as nothing is evicted, a stream equals a plain sequence. In 8 bits its K is rounded before RoPE."""
    cache = twin.cache
    cache.add_sequence(4)
    reason = next((group.kind.no_sliding for group in cache.layout.groups if group.kind.no_sliding is not None), None)
    reason = "RoPE is dynamic" if reason is None and rope.by_length else reason
    if reason is not None:
        with pytest.raises(InvalidArgument, match=reason):
            cache.enable_sliding_window(4, 12, 3)
        return
    cache.enable_sliding_window(4, 12, 3)
    with pytest.raises(InvalidArgument, match="sequence 4 slides; only sequences that do not take token trees"):
        cache.begin_forward([4], [1], token_tree_parents=[[-1]])
    if cache.layout.scales is None:
        twin.naive.add(4)
        twin.run({4: 5})
        twin.run({0: 1, 4: 1})


def send(twin: Twin, receiver: TvmCache) -> None:
    """Sequence 0, its cached positions and two more, into a cache that goes on from it."""
    sender, naive = twin.cache, twin.naive
    receiver.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, sender.num_tokens(0) + 2), 1)
    with pytest.raises(InvalidArgument, match="sequence 0 is being sent; token trees can be opened when"):
        sender.begin_forward([0], [1], token_tree_parents=[[-1]])
    twin.run({0: 1})
    twin.run({0: 1, 1: 1})
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    naive.fork(0, 100, sender.num_tokens(0))
    for _ in range(3):
        inputs = twin.draw(1)
        actual: list[Tensor] = run(receiver, [0], [1], inputs, naive.sinks)
        for own, expected in zip(actual, naive.run([100], [1], inputs), strict=True):
            assert_close(own, expected)
