"""How far a forward has come on a device, whose host has launched all of it."""

from collections import deque

import torch

SHARES = (0.5, 0.75, 0.875)  # of the layers; what is behind the last share travels after the forward


class LayerProgress:
    """Events behind some layers of one forward."""

    def __init__(self, num_layers: int) -> None:
        self._marks = {int(num_layers * share) for share in SHARES} - {0}
        self._awaited: deque[tuple[int, torch.cuda.Event]] = deque()
        self._stored = 0

    def launched(self, layer: int) -> None:
        """That layer's attention has been, on the current stream; layers come in order."""
        if layer + 1 in self._marks:
            event = torch.cuda.Event()
            event.record()
            self._awaited.append((layer + 1, event))

    def layers_stored(self) -> int | None:
        """Of how many layers K and V are known to be stored, never waits; None once there is nothing more to learn."""
        while self._awaited and self._awaited[0][1].query():
            self._stored, _ = self._awaited.popleft()
        return self._stored if self._awaited else None
