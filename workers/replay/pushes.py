"""Logs what each action pushes to peers, as the cache's writer sees it."""

from zlib import crc32

from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import Stages
from tandem.workers.replay.value_types import Pushed


class PushLog(PageWriter):
    """A PageWriter that passes everything on, and adds up what was written since it was asked last.

    Kernels that store through peer_pool() are not seen here; the maps that they follow are arguments of actions.
    """

    def __init__(self, writer: PageWriter) -> None:
        self._writer = writer
        self._pushed: dict[int, Pushed] = {}

    def take(self) -> tuple[Pushed, ...]:
        """Returns one value for each PE that was written to, in order."""
        if not self._pushed:
            return ()
        pushed, self._pushed = self._pushed, {}
        return tuple(pushed[pe] for pe in sorted(pushed))

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        self._note(pe, f"{group}.{layer}".encode() + slots.numpy().tobytes(), slots.shape[0])
        self._writer.write_tokens(pe, group, layer, k, v, token_indices, slots)

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        self._note(pe, b"%d." % group + source_slots.tobytes() + target_slots.tobytes(), target_slots.size)
        self._writer.write_slots(pe, group, source_slots, target_slots, stages)

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        return self._writer.peer_pool(pe, group)

    def _note(self, pe: int, written: bytes, positions: int) -> None:
        before = self._pushed.get(pe, Pushed(pe, 0, 0, 0))
        slots = crc32(written, before.slots)
        self._pushed[pe] = Pushed(pe, before.writes + 1, before.positions + positions, slots)
