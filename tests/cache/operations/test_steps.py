"""Steps by one position do as much as other forwards do, whatever is done between two of them."""

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kinds.kv import KV
from tandem.cache.pages import step_growth
from tandem.cache.plan.errors import OutOfPages
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Window
from tests.cache.known import check_tables, watched
from tests.support.tvm_cache import TvmCache

PAGE, LONGEST, BATCH, STEPS = 4, 60, 6, 400
STREAM = 10, 3  # window, sink
PLAIN = KVLayout((LayerGroup((0,), KV(1, 8)), LayerGroup((1,), KV(2, 8))), PAGE, torch.float32)
WINDOWED = KVLayout((LayerGroup((0,), KV(1, 8)), LayerGroup((1,), KV(1, 8, Window(9)))), PAGE, torch.float32)


class Stepping:
    """A batch that is stepped again and again; now and then something else happens to one of its sequences."""

    def __init__(self, seed: int, layout: KVLayout, num_streams: int = 0) -> None:
        """The first num_streams of the batch slide."""
        self.random, self.counts = Random(seed), Counter[str]()
        self.layout, self.num_streams = layout, num_streams
        self.cache = TvmCache(
            layout,
            [torch.zeros(200, *layout.page_shape(group)) for group in range(2)],
            max_sequences=2 * BATCH,
            max_sequence_length=LONGEST,
            rope=RopeParameters("default", 8),
            writer=None,
        )
        self.pages = self.cache._pages
        self.batch = list(range(BATCH))
        for sequence in self.batch:
            self.renew(sequence)
        self.of_streams: list[Callable[[int], None]] = [self.renew, self.pop, self.append, self.receive, self.reserve]
        self.events = [*self.of_streams, self.replace, self.grow_tree, self.verify]
        if not num_streams:
            self.events.append(self.receive_all)
        self.foreseen = False
        self.cleared = [set[int]() for _ in layout.groups]  # and not in use since
        for group, cleared in zip(self.cache._groups, self.cleared, strict=True):
            vars(group.backend)["clear_pages"] = lambda pages, cleared=cleared: cleared.update(pages.tolist())
        if not layout.drops_past:
            self.events += [self.fork, self.publish]

    def renew(self, sequence: int) -> None:
        """Another sequence of the same name, received as decode workers do or, where it can be, of published pages."""
        self.cache.remove_sequence(sequence)
        self.cache.add_sequence(sequence)
        length = self.random.randint(1, LONGEST // 2)
        if sequence < self.num_streams:
            self.cache.enable_sliding_window(sequence, *STREAM)
        elif not self.layout.drops_past:
            self.cache.match_prefix(sequence, [0] * length)
        self.cache.prepare_receive(sequence, length)
        self.cache.finish_receive(sequence)
        if self.random.random() < 0.5:
            self.reserve(sequence)

    def pop(self, sequence: int) -> None:
        """Pops some positions. As many are appended again, or not."""
        least = self.layout.drops_past or sequence < self.num_streams
        count = self.random.randint(0, min(self.cache.num_tokens(sequence), 1 if least else 9))
        self.cache.pop(sequence, count)
        if count and self.random.random() < 0.5:
            self.cache.begin_forward([sequence], [count])

    def replace(self, sequence: int) -> None:
        """Gives the sequence as many positions in other pages. A child keeps its own."""
        length, child = self.cache.num_tokens(sequence), self.forget_child(sequence)
        self.cache.fork_sequence(sequence, child)
        count = self.random.randint(1, 1 if self.layout.drops_past else length)
        if self.random.random() < 0.5:
            self.cache.pop(sequence, count)
        else:
            count = length
            self.cache.remove_sequence(sequence)
            self.cache.add_sequence(sequence)
        self.cache.prepare_receive(sequence, count)
        self.cache.finish_receive(sequence)

    def forget_child(self, sequence: int) -> int:
        """The id for another, once there is none."""
        self.cache.remove_sequence(sequence + BATCH)
        return sequence + BATCH

    def append(self, sequence: int) -> None:
        self.cache.begin_forward([sequence], [1])
        if self.random.random() < 0.5:
            self.cache.pop(sequence, 1)

    def receive(self, sequence: int) -> None:
        """Receives positions into a sequence. A stream may become no longer than a page allows."""
        self.cache.prepare_receive(sequence, self.random.choice([1, PAGE]) if sequence < self.num_streams else 1)
        self.cache.finish_receive(sequence)

    def receive_all(self, _: int) -> None:
        """Their next step is foreseen, and comes to pass unless one of them changes."""
        for one in self.batch:
            if self.cache.num_tokens(one) > LONGEST - 6:
                self.cache.pop(one, 1)  # a page that it shares becomes its last
            self.cache.reserve(one, LONGEST, 3)
            self.cache.prepare_receive(one, self.random.randint(1, 2))
        self.cache._growth.foresee(tuple(self.batch))
        for one in self.batch:
            self.cache.finish_receive(one)
        self.foreseen = self.cache._growth._foreseen is not None
        if self.random.random() < 0.3:
            (self.renew if self.layout.drops_past else self.pop)(self.random.choice(self.batch))

    def verify(self, _: int) -> None:
        """Some drafts hold, and what does not is taken back from all at once."""
        for one in self.batch:
            if self.cache.num_tokens(one) > LONGEST - 3:
                self.renew(one)
        if not self.num_streams and self.random.random() < 0.5:
            for one in self.batch:
                self.cache.reserve(one, LONGEST, 3)
        counts = [self.random.randint(1, min(3, LONGEST - self.cache.num_tokens(one))) for one in self.batch]
        check_tables(self.cache, self.cache.begin_forward(self.batch, counts))
        surplus = [self.random.randint(0, count - 1) for count in counts]
        lengths = [self.cache.num_tokens(one) - count for one, count in zip(self.batch, surplus, strict=True)]
        with watched(self.cache, "_pop") as pops:
            self.cache.pop_each(self.batch, surplus)
        assert [self.cache.num_tokens(one) for one in self.batch] == lengths
        self.counts["pops one by one" if pops else "pops at once"] += 1

    def grow_tree(self, sequence: int) -> None:
        check_tables(self.cache, self.cache.begin_forward([sequence], [3], None, [[-1, 0, 0]]))
        self.cache.commit_token_tree([sequence], [self.random.choice([-1, 0, 2])])

    def reserve(self, sequence: int) -> None:
        self.cache.reserve(sequence, self.random.randint(0, LONGEST), 3)

    def fork(self, sequence: int) -> None:
        """Forks a sequence once it has a child. The child may become one token longer, or end in a page that is full
        there."""
        child = self.forget_child(sequence)
        self.cache.fork_sequence(sequence, child, self.random.randint(1, self.cache.num_tokens(sequence)))
        if self.random.random() < 0.5:
            self.cache.begin_forward([child], [1])
        if self.random.random() < 0.5:
            self.cache.remove_sequence(sequence)
            self.cache.fork_sequence(child, sequence)
        if self.random.random() < 0.5:
            self.cache.pop(sequence, self.random.randint(0, self.cache.num_tokens(sequence)))

    def publish(self, sequence: int) -> None:
        self.cache.publish_prefix(sequence, [0] * self.cache.num_tokens(sequence))

    def run(self) -> None:
        before = None
        for _ in range(STEPS):
            for sequence in self.batch:
                if self.cache.num_tokens(sequence) > LONGEST - 6:
                    self.renew(sequence)
                    before = None
            count = self.random.choice([1] * 30 + [2])
            with watched(self.pages, "step") as steps:
                plan = self.cache.begin_forward(self.batch, [count] * BATCH)
            assert plan.tokens.positions.size == count * BATCH
            check_tables(self.cache, plan)
            self.check_pages(plan)
            if self.foreseen:
                as_foreseen = bool(steps) and not steps[-1]["clear"]
                self.counts["foreseen" if as_foreseen else "not as foreseen"] += 1
            self.foreseen = False
            begun = (plan.tokens.positions % PAGE == 0).any()
            self.counts["others" if not steps else "steps that begin pages" if begun else "steps"] += 1
            if before is not None and steps and (kv_lens_of(plan) < kv_lens_of(before)).any():
                self.counts["steps at which pages leave a window"] += 1
            if before is not None and steps and (plan.tokens.seq_lens < before.tokens.seq_lens).any():
                self.counts["steps at which streams let go of pages"] += 1
            before = plan
            if self.random.random() < 0.2:
                sequence = self.random.choice(self.batch)
                event = self.random.choice(self.of_streams if sequence < self.num_streams else self.events)
                event(sequence)
                before = None
                self.counts[event.__name__] += 1

    def check_pages(self, plan: Forward) -> None:
        """Checks that reserved pages are there, as far as no window makes do with less, and that pages begun or
        received into are cleared."""
        table = self.cache._table
        rows = [table.row(sequence) for sequence in self.batch]
        assert (table.groups[0].ends[rows] * PAGE >= table.reserved[rows]).all()
        assert not table.unclean[rows].any()
        for group, cleared in zip(plan.attention.plans, self.cleared, strict=True):
            slots = group.tables.slot_mapping
            assert cleared.issuperset((slots[slots % PAGE == 0] // PAGE).tolist())
            cleared.difference_update(group.tables.kv_indices.tolist())


def kv_lens_of(plan: Forward) -> np.ndarray:
    return plan.attention.plans[1].tables.kv_lens


STEP_KINDS = {"steps", "steps that begin pages", "others"}
FORESEEN = {"foreseen", "not as foreseen"}


@pytest.mark.gate("windows-native", "streams-native")
@pytest.mark.parametrize("way", ["native", "numpy"])
@pytest.mark.parametrize(
    ("layout", "num_streams", "kinds"),
    [
        (PLAIN, 0, FORESEEN | {"pops one by one", "pops at once"}),
        (WINDOWED, 0, FORESEEN | {"steps at which pages leave a window"}),
        (PLAIN, 3, {"steps at which streams let go of pages"}),
    ],
    ids=["plain", "windows", "streams"],
)
def test_steps_are_as_if_planned_anew(
    layout: KVLayout, num_streams: int, kinds: set[str], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "numpy":
        monkeypatch.setattr(step_growth, "load_short_calls", lambda source: None)
    counts, expected = Counter[str](), STEP_KINDS | kinds
    for seed in range(4):
        stepping = Stepping(seed, layout, num_streams)
        assert (stepping.pages._steps is None) == (way == "numpy")
        stepping.run()
        counts += stepping.counts
        expected |= {event.__name__ for event in stepping.events}
    assert counts.keys() >= expected


def test_pages_foreseen_are_cleared_once_and_others_all_the_same() -> None:
    cleared: list[int] = []
    cache = TvmCache(
        PLAIN,
        [torch.zeros(40, *PLAIN.page_shape(group)) for group in range(2)],
        max_sequences=2,
        max_sequence_length=LONGEST,
        rope=RopeParameters("default", 8),
        writer=None,
    )
    vars(cache._groups[0].backend)["clear_pages"] = lambda pages: cleared.extend(pages.tolist())

    def receive(sequence: int, length: int, *, foresee: bool) -> None:
        cache.prepare_receive(sequence, length)
        if foresee:
            cache._growth.foresee((sequence,))
        cache.finish_receive(sequence)
        if not foresee:
            cleared.clear()

    def begun(sequence: int) -> int:
        """The page that a step begins."""
        plan = cache.begin_forward([sequence], [1])
        assert plan.tokens.positions % PAGE == 0
        return int(plan.attention.plans[0].tables.slot_mapping[0]) // PAGE

    for sequence in range(2):
        cache.add_sequence(sequence)
        cache.reserve(sequence, 30)
    receive(0, PAGE, foresee=True)
    assert [begun(0)] == cleared
    receive(1, 2 * PAGE, foresee=True)  # but another of its length steps
    receive(0, PAGE - 1, foresee=False)
    assert begun(0) in cleared
    receive(1, PAGE, foresee=False)  # it is longer when it steps
    assert begun(1) in cleared
    receive(1, PAGE - 1, foresee=True)  # what is reserved is other pages by then
    cache.reserve(1, 0)
    cache.pop(1, 1)
    cache.reserve(0, 40)
    receive(1, 1, foresee=False)
    cache.reserve(1, 30)
    assert begun(1) in cleared


def test_no_room_changes_nothing() -> None:
    layout = KVLayout((LayerGroup((0,), KV(1, 8)),), PAGE, torch.float32)
    cache = TvmCache(
        layout,
        [torch.zeros(3, *layout.page_shape(0))],
        max_sequences=2,
        max_sequence_length=LONGEST,
        rope=RopeParameters("default", 8),
        writer=None,
    )
    for sequence, length in enumerate((PAGE - 1, PAGE)):
        cache.add_sequence(sequence)
        cache.begin_forward([sequence], [length])
    cache.begin_forward([0, 1], [1, 1])  # takes the last page
    for _ in range(2):
        with pytest.raises(OutOfPages):
            cache.begin_forward([0, 1], [1, 1])
        assert (cache.num_tokens(0), cache.num_tokens(1), cache.num_free_pages) == (PAGE, PAGE + 1, 0)
    cache.pop(0, 1)
    check_tables(cache, cache.begin_forward([0, 1], [1, 1]))
