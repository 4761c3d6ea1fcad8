"""How far forwards on a GPU have stored what they append: layers can be sent before the last one is computed."""

from collections.abc import Sequence

import torch

LEFT = (4, 1, 0)  # layers that are yet to be stored when an event comes

Stages = Sequence[tuple[int, torch.cuda.Event]]
"""(n, event): once the event has come, the first n layers are stored. n ascends; the last one is of all layers."""


class StoredLayers:
    """Of one layer group. Each forward records the same events anew: whoever waited for them before waits for those of
    the forward before. A CUDA graph that is captured with note() records them, too.

    Of long prompts a layer takes longer to compute than all layers take to copy; four layers of the smallest models do.
    """

    def __init__(self, num_layers: int) -> None:
        self.stages: Stages = [
            (num_layers - left, torch.cuda.Event(external=True)) for left in LEFT if left < num_layers
        ]

    def note(self, layer: int) -> None:
        """What stores this layer, which counts within the group, was launched on the current stream."""
        for num_layers, event in self.stages:
            if num_layers == layer + 1:
                event.record()
