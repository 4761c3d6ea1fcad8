"""How far a forward on a GPU has stored what it appends, so that its layers can be sent before it ends."""

from collections.abc import Sequence

import torch

Stages = Sequence[tuple[int, torch.cuda.Event]]
"""(n, event): once the event has come, the first n layers are stored. n ascends; the last one is of all layers."""


class StoredLayers:
    """Of one layer group in one forward: events behind its last layer but one and its last.

    To compute a layer takes longer than to copy all those before it, by an order of magnitude for prompts worth a
    thought, so more events would bring nothing.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._stages: list[tuple[int, torch.cuda.Event]] = []

    def note(self, layer: int) -> None:
        """The append of this layer, which counts within the group, was launched on the current stream."""
        if layer >= self._num_layers - 2:
            event = torch.cuda.Event()
            event.record()
            self._stages.append((layer + 1, event))

    @property
    def stages(self) -> Stages:
        """Empty until all layers are launched."""
        done = self._stages and self._stages[-1][0] == self._num_layers
        return self._stages if done else ()
