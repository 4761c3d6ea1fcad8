"""The kernel that chooses positions, compiled for Hopper: Triton's interpreter takes code that its compiler refuses."""

import json

from tests.support.hopper import REGISTERS, taken, told_by

WARPS, THREADS_OF_WARP = 8, 32
PROGRAMS = 2  # at once on a multiprocessor


def registers() -> int:
    """Of a thread."""
    from tandem.cache.kernels.triton.top_k import SCORES_AT_ONCE, _choose

    types = {"scores": "*fp32", "lengths": "*i32", "chosen": "*i32", "scores_row": "i32", "top_k": "i32"}
    return taken(_choose, {"BLOCK": SCORES_AT_ONCE, "PDL": True}, types, num_warps=WARPS).registers


def test_it_compiles_and_a_multiprocessor_has_room_for_two() -> None:
    assert told_by(__name__) * WARPS * THREADS_OF_WARP * PROGRAMS <= REGISTERS


if __name__ == "__main__":
    print(json.dumps(registers()))
