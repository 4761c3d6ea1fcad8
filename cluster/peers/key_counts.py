"""Counts of callers' keys on one host, as they travel to another."""

from dataclasses import dataclass

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.proto import peer_pb2


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """ids: int64 [keys]. windows: int64 [keys, units, seconds], the current second first. table: a number of the table
    that counts."""

    ids: Int64Array
    windows: Int64Array
    table: int = 0

    def to_proto(self) -> peer_pb2.GetKeyCountsResponse:
        cells = np.flatnonzero(self.windows)
        counts = self.windows.reshape(-1)[cells]
        packed = cells.astype("<u4").tobytes(), counts.astype("<i8").tobytes()
        return peer_pb2.GetKeyCountsResponse(table=self.table, ids=self.ids.tolist(), cells=packed[0], counts=packed[1])

    @classmethod
    def from_proto(cls, message: peer_pb2.GetKeyCountsResponse, units: int, seconds: int) -> "KeyCounts":
        """Reads a message. Raises ValueError for a message whose counts do not fit together."""
        ids = np.array(message.ids, np.uint64).astype(np.int64)
        cells, counts = np.frombuffer(message.cells, "<u4"), np.frombuffer(message.counts, "<i8")
        windows = np.zeros((len(ids), units, seconds), np.int64)
        if len(cells) != len(counts) or (len(cells) and int(cells.max()) >= windows.size):
            raise ValueError(f"{len(cells)} cells, {len(counts)} counts of {len(ids)} keys do not fit together")
        windows.reshape(-1)[cells] = counts
        return cls(ids, windows, message.table)
