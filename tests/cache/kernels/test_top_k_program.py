"""The kernels that choose positions, compiled for Hopper: Triton's interpreter takes code that its compiler refuses."""

import json

import pytest

from tests.support.hopper import REGISTERS, SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

WARPS, THREADS_OF_WARP = 8, 32
PROGRAMS = 2  # at once on a multiprocessor
MOST_REGISTERS = 255  # of a thread, from where on they spill
Report = dict[str, tuple[int, int]]


def compiled() -> Report:
    """Registers of a thread and bytes of shared memory by kernel."""
    from tandem.cache.kernels.triton.top_k import MOST_CHUNKS, _choose
    from tandem.cache.kernels.triton.top_k_chunks import SCORES_AT_ONCE, _count, _write

    types = {"scores": "*fp32", "scores_row": "i32", "top_k": "i32", "num_chunks": "i32"}
    types |= dict.fromkeys(("lengths", "chosen", "counts", "above", "found"), "*i32")
    fixed = {"BLOCK": SCORES_AT_ONCE, "PDL": True}
    kernels = {"choose": (_choose, fixed)}
    for chunks in (2, MOST_CHUNKS):
        kernels |= {f"count {n} of {chunks}": (_count, fixed | {"CHUNKS": chunks, "NUMBER": n}) for n in range(4)}
        kernels |= {f"write {chunks}": (_write, fixed | {"CHUNKS": chunks})}
    report = Report()
    for name, (kernel, its) in kernels.items():
        one = taken(kernel, its, types, num_warps=WARPS)
        report[name] = one.registers, one.shared_bytes
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    return told_by(__name__)


def test_all_compile_and_a_multiprocessor_has_room_for_two_rows(report: Report) -> None:
    """Each row has a program, and there may be many rows."""
    assert len(report) == 11
    assert report["choose"][0] * WARPS * THREADS_OF_WARP * PROGRAMS <= REGISTERS
    assert all(PROGRAMS * shared <= SHARED_BYTES for _, shared in report.values()), report


def test_none_spills(report: Report) -> None:
    assert all(registers < MOST_REGISTERS for registers, _ in report.values()), report


if __name__ == "__main__":
    print(json.dumps(compiled()))
