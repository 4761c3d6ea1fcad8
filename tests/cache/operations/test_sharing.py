"""Attention of sequences that share pages, against caches that keep every token of each by itself."""

from random import Random

import pytest
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shared_prefixes import SharingRule
from tests.cache.naive import QUERY_HEADS, Inputs, NaiveCache, NaiveSequence, cache_of, draw_inputs, layout_of, windowed
from tests.cache.sharing_kernels import ALL, sharing_all
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2, 1)
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
assert SINKS.numel() == QUERY_HEADS


@torch.inference_mode()
def forward(
    cache: TvmCache, sequences: list[int], counts: list[int], inputs: Inputs, sinks: Tensor | None = None
) -> tuple[Forward, list[Tensor]]:
    plan = cache.begin_forward(sequences, counts)
    outputs = [cache.attention(plan, layer, *qkv, sinks) for layer, qkv in enumerate(inputs.layers)]
    cache.end_forward(plan)
    return plan, outputs


class Twins:
    """A paged cache whose kernels share what they can, and a naive one."""

    def __init__(
        self,
        layout: KVLayout = LAYOUT,
        *,
        rule: SharingRule = ALL,
        num_pages: int = 64,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.cache = cache_of(layout, num_pages, kernels=sharing_all(TorchKernels, rule), softcap=softcap)
        self.naive = NaiveCache(layout, softcap=softcap, sinks=sinks)
        self.sinks = sinks
        self.seed = 0

    def add(self, sequence: int) -> None:
        self.cache.add_sequence(sequence)
        self.naive.add(sequence)

    def fork(self, parent: int, child: int, position: int) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.naive.fork(parent, child, position)

    def pop(self, sequence: int, count: int) -> None:
        self.cache.pop(sequence, count)
        self.naive.pop(sequence, count)

    def remove(self, sequence: int) -> None:
        self.cache.remove_sequence(sequence)
        self.naive.remove(sequence)

    def run(self, appends: dict[int, int]) -> Forward:
        """One forward of both, outputs compared."""
        sequences, counts = list(appends), list(appends.values())
        self.seed += 1
        inputs = draw_inputs(self.layout, sum(counts), seed=self.seed)
        plan, outputs = forward(self.cache, sequences, counts, inputs, self.sinks)
        for actual, expected in zip(outputs, self.naive.run(sequences, counts, inputs), strict=True):
            assert_close(actual, expected)
        return plan


def levels(plan: Forward, group: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Returns for each segment its sequences and the number of its pages."""
    shared = plan.attention.plans[group].tables.shared
    if shared is None:
        return []
    queries, pages = shared.qo_indptr.tolist(), shared.kv_indptr.tolist()
    return [
        (
            tuple(plan.seq_ids[member] for member in shared.members[queries[s] : queries[s + 1]]),
            pages[s + 1] - pages[s],
        )
        for s in range(len(queries) - 1)
    ]


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, SINKS)], ids=["plain", "softcap-sinks"])
def test_forks_of_forks(softcap: float | None, sinks: Tensor | None) -> None:
    """Three levels; pages are full where a fork is in the middle of one, too."""
    twins = Twins(softcap=softcap, sinks=sinks)
    twins.add(0)
    twins.run({0: 14})
    for child in (1, 2, 3):
        twins.fork(0, child, 14)
    twins.run({1: 9, 2: 7})
    for parent, child in ((1, 4), (1, 5), (2, 6)):
        twins.fork(parent, child, twins.cache.num_tokens(parent))
    twins.run({4: 8, 5: 1})
    twins.fork(4, 7, 28)
    twins.add(8)
    for _ in range(6):
        plan = twins.run(dict.fromkeys((8, 3, 7, 5, 0, 1, 2, 4, 6), 1))
        expected = [((3, 7, 5, 0, 1, 2, 4, 6), 3), ((2, 6), 2), ((7, 5, 1, 4), 2), ((7, 4), 2)]
        assert sorted(levels(plan)) == sorted(levels(plan, 1)) == sorted(expected)


def test_beside_prompts_streams_and_strangers() -> None:
    """Only sequences with one new token share; a fork of a stream, whose K is not rotated, does not."""
    twins = Twins()
    twins.add(0)
    twins.run({0: 17})
    for child in (1, 2, 3):
        twins.fork(0, child, 16)
    twins.add(4)
    twins.run({4: 5})
    twins.cache.add_sequence(10)
    twins.cache.enable_sliding_window(10, 16, 8)
    forward(twins.cache, [10], [8], draw_inputs(LAYOUT, 8, seed=99))
    twins.cache.fork_sequence(10, 11, 8)
    alone = cache_of(LAYOUT)
    for stream in (10, 11):
        alone.add_sequence(stream)
        alone.enable_sliding_window(stream, 16, 8)
        forward(alone, [stream], [8], draw_inputs(LAYOUT, 8, seed=99))
    appends = {2: 3, 10: 1, 1: 1, 4: 1, 11: 1, 0: 1, 3: 1}
    for step in range(3):
        inputs = draw_inputs(LAYOUT, 9, seed=step)
        plan, outputs = forward(twins.cache, list(appends), list(appends.values()), inputs)
        assert levels(plan) == [((1, 0, 3), 4)]
        rows = {"streams": [3, 6], "others": [0, 1, 2, 4, 5, 7, 8]}
        some = {of: Inputs([(q[at], k[at], v[at]) for q, k, v in inputs.layers]) for of, at in rows.items()}
        others = twins.naive.run([2, 1, 4, 0, 3], [3, 1, 1, 1, 1], some["others"])
        _, streams = forward(alone, [10, 11], [1, 1], some["streams"])
        for actual, other, stream in zip(outputs, others, streams, strict=True):
            assert_close(actual[rows["others"]], other)
            assert_close(actual[rows["streams"]], stream.double())


def test_streams_that_slide_leave_what_others_share() -> None:
    """It is not looked for again."""
    twins = Twins()
    twins.add(0)
    twins.run({0: 17})
    twins.fork(0, 1, 16)
    twins.cache.add_sequence(10)
    twins.cache.enable_sliding_window(10, 16, 8)
    plans = [twins.cache.begin_forward([0, 1, 10], [1, 1, 1]) for _ in range(40)]
    assert levels(plans[0]) == [((0, 1), 4)]
    assert all(plan.attention.plans[0].tables.shared is plans[0].attention.plans[0].tables.shared for plan in plans)


def test_layer_groups_with_a_window_do_not_share() -> None:
    twins = Twins(windowed(LAYOUT, None, 11))
    twins.add(0)
    twins.run({0: 21})
    twins.fork(0, 1, 21)
    for _ in range(5):
        plan = twins.run({0: 1, 1: 1})
        assert levels(plan) == [((0, 1), 5)]
        assert levels(plan, 1) == []


def test_prefixes_of_the_index() -> None:
    twins, prompt = Twins(), list(range(13))
    twins.add(0)
    twins.run({0: 13})
    twins.cache.publish_prefix(0, prompt)
    of = twins.naive.sequences[0]
    for sequence, own in ((1, []), (2, [50] * 9), (3, [60])):
        twins.cache.add_sequence(sequence)
        assert twins.cache.match_prefix(sequence, [*prompt[:12], *own, 99]) == 12
        twins.naive.sequences[sequence] = NaiveSequence([k[:12] for k in of.keys], [v[:12] for v in of.values])
    twins.run({1: 1, 2: 10, 3: 2})
    twins.remove(0)
    for _ in range(5):
        assert levels(twins.run({1: 1, 2: 1, 3: 1})) == [((1, 2, 3), 3)]


def test_what_is_known_of_a_batch_is_forgotten_when_pages_change() -> None:
    """The same sequences, step after step: one goes back into what it shares, one is another under the old name."""
    twins = Twins()
    twins.add(0)
    twins.run({0: 20})
    twins.fork(0, 1, 20)
    twins.fork(0, 2, 20)
    batch = dict.fromkeys(range(3), 1)
    assert levels(twins.run(batch)) == [((0, 1, 2), 5)]
    first = twins.run(batch).attention.plans[0].tables.shared
    assert twins.run(batch).attention.plans[0].tables.shared is first
    twins.pop(1, 14)  # to 9 of 23 positions
    assert levels(twins.run(batch)) == [((0, 1, 2), 2), ((0, 2), 3)]
    for _ in range(5):
        twins.run(batch)
    twins.remove(2)
    twins.fork(1, 2, 12)
    assert levels(twins.run(batch)) == [((0, 1, 2), 2), ((1, 2), 1)]


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int) -> None:
    """Forks, pops and forwards of random sequences, most of them decodes, under a rule that some levels fail."""
    random = Random(seed)
    twins = Twins(rule=SharingRule(1 + seed, 2 + seed), num_pages=160)
    twins.add(0)
    twins.run({0: 24})
    shared, batch = 0, {0: 1}
    for step in range(1, 60):
        known = list(twins.naive.sequences)
        one = random.choice(known)
        length = twins.cache.num_tokens(one)
        if len(known) < 12 and random.random() < 0.4:
            twins.fork(one, step, random.randint(length // 2, length))
        elif random.random() < 0.2:
            twins.pop(one, random.randint(0, length // 2))
        elif len(known) > 8 and random.random() < 0.2:
            twins.remove(one)
        if random.random() < 0.5 or any(one not in twins.naive.sequences for one in batch):
            known = list(twins.naive.sequences)
            batch = dict.fromkeys(random.sample(known, random.randint(1, len(known))), 1)
        for sequence in [one for one in batch if twins.cache.num_tokens(one) > 50]:
            twins.pop(sequence, 30)
        shared += bool(levels(twins.run(batch | ({next(iter(batch)): 3} if random.random() < 0.2 else {}))))
    assert shared > 15
