"""Slots of many maps side by side, against a dict."""

import numpy as np

from tandem.cache.pages.map_slots import FIRST_CAPACITY, MapSlots
from tandem.cache.plan.position_map import SKIP, PositionMap, SlotRuns

ROWS, GROUPS = 8, 2


def test_maps_come_and_go() -> None:
    random = np.random.default_rng(0)
    slots, known = MapSlots(GROUPS, ROWS), dict[int, list[np.ndarray]]()
    for _ in range(400):
        row = int(random.integers(ROWS))
        if random.random() < 0.3:
            slots.drop(row)
            known.pop(row, None)
        else:
            count = int(random.integers(1, FIRST_CAPACITY // 2))
            known[row] = [random.integers(SKIP, 3 * count, count).astype(np.int32) for _ in range(GROUPS)]
            slots.put(row, PositionMap(0, tuple(map(SlotRuns.from_slots, known[row]))))
        assert slots.counts.tolist() == [known[row][0].size if row in known else 0 for row in range(ROWS)]
        for row, of_groups in known.items():
            begin, count = int(slots.offsets[row]), of_groups[0].size
            assert np.array_equal(slots.slots[:, begin : begin + count], of_groups)
            assert slots.num_wanted(row, [count // 2] * GROUPS) == [
                int((one[: count // 2] != SKIP).sum()) for one in of_groups
            ]
    assert slots.slots.shape[1] <= 4 * ROWS * FIRST_CAPACITY // 2 + FIRST_CAPACITY  # no more than is in use at once
