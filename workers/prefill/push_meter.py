"""Measures how long a worker spends on writes to its peers."""

import time

from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import Stages


class PushMeter(PageWriter):
    """A PageWriter that passes everything on and adds up the seconds until the calls returned.

    They are the writes' own only where calls write; on a GPU they are the host's time to queue them.
    """

    def __init__(self, writer: PageWriter) -> None:
        self._writer = writer
        self.seconds = 0.0

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        began = time.perf_counter()
        self._writer.write_tokens(pe, group, layer, k, v, token_indices, slots)
        self.seconds += time.perf_counter() - began

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        began = time.perf_counter()
        self._writer.write_slots(pe, group, source_slots, target_slots, stages)
        self.seconds += time.perf_counter() - began

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        return self._writer.peer_pool(pe, group)
