"""Checks that the writer learns when layers of a forward are stored, because it sends them afterwards."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.stored_layers import LEFT, StoredLayers
from tests.cache.attention.test_prompt_buffers import begin, prompt_buffers
from tests.cache.attention.test_step_buffers import draw, make_cache, run
from tests.cache.island import Island, forward
from tests.cache.naive import HEAD_DIM, draw_inputs, layout_of, run_layer
from tests.cache.peer_writer import PeerWriter
from tests.support.tvm_cache import TvmCache

SIX_LAYERS = KVLayout((LayerGroup(tuple(range(6)), KV(2, HEAD_DIM)),), 4, torch.float32)


class Event:
    """A number for each that is recorded, in their order."""

    last = 0

    def __init__(self, external: bool) -> None:
        assert external  # CUDA graphs record it
        self.number = 0

    def record(self) -> None:
        Event.last += 1
        self.number = Event.last


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def noting(layout: KVLayout) -> Island:
    """Makes an island whose first cache notes stored layers as on a GPU."""
    island = Island.of(layout)
    note(island.caches[0])
    return island


def note(cache: TvmCache) -> None:
    for group, layers in zip(cache._groups, cache.layout.groups, strict=True):
        group.stored = StoredLayers(len(layers.layers))


def numbers(stages: Any) -> list[tuple[int, int]]:
    return [(num_layers, event.number) for num_layers, event in stages]


@pytest.mark.parametrize(("num_layers", "expected"), [(1, [1]), (2, [1, 2]), (5, [1, 4, 5]), (36, [32, 35, 36])])
def test_events_come_behind_the_last_layers(num_layers: int, expected: list[int]) -> None:
    stored, behind = StoredLayers(num_layers), {}
    for layer in range(num_layers):
        stored.note(layer)
        behind[layer + 1] = Event.last
    assert numbers(stored.stages) == [(count, behind[count]) for count in expected]


@pytest.mark.parametrize("layout", [SIX_LAYERS, layout_of(1, 4)])
def test_a_writer_hears_when_layers_are_stored(layout: KVLayout) -> None:
    island = noting(layout)
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 6), 1)
    inputs = draw_inputs(layout, 6, seed=1)
    plan, behind = sender.begin_forward([0], [6], push=False), {}
    for layer, tensors in enumerate(inputs.layers):
        run_layer(sender, plan, layer, *tensors)
        behind[layer] = Event.last
    sender.end_forward(plan)
    sender.send_cached(0)
    for group, stages in zip(layout.groups, island.writer.stages, strict=True):
        counts = [len(group.layers) - left for left in LEFT if left < len(group.layers)]
        assert numbers(stages) == [(count, behind[group.layers[count - 1]]) for count in counts]


@pytest.mark.parametrize("change", ["nothing", "more to come", "popped", "another"])
def test_stages_are_those_of_the_last_forward_of_what_is_marked(change: str) -> None:
    """There is an earlier forward beside which the marked one can go."""
    island = noting(layout_of(2))
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.add_sequence(1)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 9 if change == "more to come" else 4), 1)
    forward(sender, 0, 4, push=False)
    if change == "popped":
        sender.pop(0, 1)
        sender.begin_forward([0], [1], push=False)
    elif change == "another":
        forward(sender, 1, 4, push=False)
    sender.send_cached(0)
    assert [len(stages) for stages in island.writer.stages[-1:]] == [2 if change == "nothing" else 0]


def test_what_a_push_finds_cached_has_no_stages() -> None:
    """It goes after what was launched before the forward that pushes."""
    island = noting(layout_of(2))
    sender, receiver = island.caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    forward(sender, 0, 4, push=False)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 6), 1)
    forward(sender, 0, 2)
    assert np.array(island.writer.slot_writes)[:, 2].tolist() == [4]
    assert island.writer.stages == [()]


def test_a_forward_in_graph_buffers_notes_its_layers_too() -> None:
    """A captured graph does so at each replay."""
    cache = make_cache()
    note(cache)
    (prompts,) = prompt_buffers(cache, [4], 3)
    attend, before = prompts.attention().attend, Event.last
    cache.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(range(7)),) * 2), 1)
    begin(cache, prompts, {0: 4}, np.zeros(4, np.int64), np.zeros(0, np.int64))
    run(attend, draw(4, seed=0))
    cache.send_cached(0)
    writer = cache._writer
    assert isinstance(writer, PeerWriter)
    recorded = [number for stages in writer.stages for _, number in numbers(stages)]
    assert sorted(recorded) == list(range(before + 1, before + 1 + len(recorded)))
    assert [stages[-1][0] for stages in writer.stages] == [len(group.layers) for group in cache.layout.groups]
