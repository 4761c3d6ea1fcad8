"""When layers of a forward are stored, told to the writer that sends them afterwards."""

import pytest
import torch

from tandem.cache.layout import KVLayout
from tandem.cache.stored_layers import StoredLayers
from tests.cache.island import Island, forward
from tests.cache.naive import draw_inputs, layout_of, run_layer


class Event:
    """A number for each that is recorded, in their order."""

    last = 0

    def record(self) -> None:
        Event.last += 1
        self.number = Event.last


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def numbers(stages: object) -> list[tuple[int, int]]:
    assert isinstance(stages, list | tuple)
    return [(num_layers, event.number) for num_layers, event in stages]


@pytest.mark.parametrize(("num_layers", "expected"), [(1, [1]), (2, [1, 2]), (36, [35, 36])])
def test_the_last_two_layers_are_noted_once_all_are_launched(num_layers: int, expected: list[int]) -> None:
    stored = StoredLayers(num_layers)
    for layer in range(num_layers):
        assert stored.stages == ()
        stored.note(layer)
    assert [count for count, _ in stored.stages] == expected


@pytest.mark.parametrize("layout", [layout_of(2), layout_of(1, 4)])
def test_a_writer_hears_when_layers_were_stored(layout: KVLayout) -> None:
    """And a forward that pushes by itself notes nothing."""
    island = Island.of(layout)
    sender, receiver = island.caches
    sender._transmissions._on_gpu = True
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 9), 1)
    inputs = draw_inputs(layout, 6, seed=1)
    plan, behind, before = sender.begin_forward([0], [6], push=False), {}, Event.last
    for layer, tensors in enumerate(inputs.layers):
        run_layer(sender, plan, layer, *tensors)
        behind[layer] = Event.last
    sender.end_forward(plan)
    sender.send_cached(0)
    for group, stages in zip(layout.groups, island.writer.stages, strict=True):
        assert numbers(stages) == [(count, behind[layer]) for count, layer in enumerate(group.layers, start=1)][-2:]
    assert Event.last - before == sum(min(2, len(group.layers)) for group in layout.groups)
    pushing = sender.begin_forward([0], [3])
    assert all(group.stored is None for group in pushing.groups)


@pytest.mark.parametrize("change", ["nothing", "pushed", "popped", "another", "unfinished"])
def test_stages_are_those_of_the_last_forward_of_the_sequence(change: str) -> None:
    island = Island.of(layout_of(2))
    sender, receiver = island.caches
    sender._transmissions._on_gpu = True
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.add_sequence(1)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 9), 1)
    forward(sender, 0, 4, push=False)
    if change == "pushed":
        forward(sender, 0, 1)
        sender.pop(0, 1)
    elif change == "popped":
        sender.pop(0, 1)
    elif change == "another":
        forward(sender, 1, 4, push=False)
    elif change == "unfinished":
        plan = sender.begin_forward([0], [1], push=False)
        run_layer(sender, plan, 0, *draw_inputs(sender.layout, 1, seed=0).layers[0])
    sender.send_cached(0)
    assert [len(stages) for stages in island.writer.stages[-1:]] == [2 if change == "nothing" else 0]
