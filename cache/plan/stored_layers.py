"""How far forwards on a GPU have stored what they append: layers can be sent before the last one is computed."""

from collections.abc import Sequence

import torch

LEFT = (4, 1, 0)  # layers that are yet to be stored when an event comes

Stages = Sequence[tuple[int, torch.cuda.Event]]
"""(n, event): once the event has come, the first n layers are stored. n ascends; the last one is of all layers."""


class StoredLayers:
    """Events that tell when the layers of one group are stored. Each forward records the same events anew. So a wait
    from before waits for the previous forward. A CUDA graph that is captured with note() records them, too.

    In long prompts a layer takes longer to compute than all layers take to copy. In the smallest models four layers do.
    """

    def __init__(self, num_layers: int) -> None:
        self.stages: Stages = [
            (num_layers - left, torch.cuda.Event(external=True)) for left in LEFT if left < num_layers
        ]

    def note(self, layer: int) -> None:
        """Notes that the kernels that store this layer were launched on the current stream. The layer counts within the
        group."""
        for num_layers, event in self.stages:
            if num_layers == layer + 1:
                event.record()
