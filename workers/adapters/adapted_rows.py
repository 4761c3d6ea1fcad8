"""The LoRA adapter of each row of a forward, for the layers that a runner launches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int64Array
from tandem.workers.adapters.adapters import NO_ADAPTER, Adapters
from tandem.workers.weights.adapted import AdapterRows


class AdaptedRows:
    """The adapters of a runner's rows. Rows without an adapter are computed as if there were none."""

    def __init__(self, adapters: Adapters | None, device: torch.device) -> None:
        self._adapters, self._device = adapters, device
        self._rows = AdapterRows() if adapters is None else adapters.rows

    @property
    def serves(self) -> bool:
        """Returns whether a row may have an adapter."""
        return self._adapters is not None

    @property
    def num_inputs(self) -> int:
        """Arrays of a step in graph buffers that say so: see inputs()."""
        return int(self.serves)

    def any(self, sequence_ids: Sequence[int] | Int64Array) -> bool:
        """Returns whether one of the sequences has an adapter."""
        return self._adapters is not None and self._adapters.any_uses(sequence_ids)

    def begin(self, forward: Forward) -> None:
        """Announces the next forward that the model computes eagerly."""
        if self._adapters is None:
            return
        slots = self._adapters.slots_of(forward.seq_ids)
        self.use(None if slots is None else upload([slots[forward.tokens.owners]], self._device)[0])

    def inputs(self, sequence_ids: Sequence[int] | Int64Array, appends: Int64Array | None) -> list[Int64Array]:
        """num_inputs arrays, int64 [T], for a step of so many tokens of each sequence; None: one each."""
        if self._adapters is None:
            return []
        slots = self._adapters.slots_of(sequence_ids, appends)
        count = len(sequence_ids) if appends is None else int(appends.sum())
        return [np.full(count, NO_ADAPTER) if slots is None else slots]

    def use(self, slots: Tensor | None) -> None:
        """See AdapterRows.use."""
        self._rows.use(slots)
