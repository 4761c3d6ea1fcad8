"""Positions that are cached, or will be, on their way to another worker: layer by layer."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from tandem.cache.group_attention import GroupForward
from tandem.cache.layout import KVLayout
from tandem.cache.send_plan import Sends


class CachedSend:
    """Used by the owner of the cache, for as long as it has the sequence."""

    def __init__(
        self, groups: Sequence[GroupForward], layout: KVLayout, sends: Sends, issued: Callable[[], None]
    ) -> None:
        """issued is called when all has been."""
        self._groups = groups
        self._layers = [group.layers for group in layout.groups]
        self._sends = sends
        self._issued = issued
        self._next = [0] * len(sends)  # layer within each group

    def write_stored(self, num_layers: int) -> None:
        """The model's first num_layers layers, as far as they were not yet: on the device all of them are computed."""
        self._write([bisect_left(layers, num_layers) for layers in self._layers], stored=True)

    def write_rest(self) -> None:
        """All other layers, behind the forwards that were launched so far; what is sent counts as issued."""
        self._write([len(layers) for layers in self._layers], stored=False)
        self._issued()

    def _write(self, ends: Sequence[int], *, stored: bool) -> None:
        for index, (group, sends, end) in enumerate(zip(self._groups, self._sends, ends, strict=True)):
            begin, self._next[index] = self._next[index], max(self._next[index], end)
            if begin < end:
                group.push_cached(sends, range(begin, end), stored=stored)
