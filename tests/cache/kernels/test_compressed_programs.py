"""The kernels of compressed KV, compiled for Hopper at DeepSeek-V4's sizes: Triton's interpreter takes code that its
compiler refuses, and knows no limits of a multiprocessor."""

import json

import pytest

from tests.support.hopper import REGISTERS, SHARED_BYTES, taken, told_by

SIZE, KEY_SIZE, ROTATED, WINDOW, PAGE = 512, 128, 64, 128, 64
WARPS, THREADS = 4, 128
MOST_REGISTERS = 255  # of a thread, from where on they spill
I32, I64, F32 = "*i32", "*i64", "*fp32"
PAGES = {f"{of}{name}": I32 for of in ("", "input_", "entry_", "beside_") for name in ("firsts", "begins")}
PAGES |= {"input_pages": I32, "entry_pages": I32, "kv_indices": I32, "beside_indices": I32, "slots": I32}
NUMBERS = dict.fromkeys(("num_heads", "extra", "all_sums", "shares"), "i32")
TOKENS = {"positions": I64, "preceding": I32, "visible": I32, "chosen": I32, "sinks": F32, "found": F32, "sums": F32}
COMPRESS = {"values": F32, "gates": F32, "bias": F32, "norm": F32, "inputs": F32, "eps": "fp32", "cos": F32, "sin": F32}
Report = dict[str, tuple[int, int]]


def compiled() -> Report:
    """Registers of a thread and bytes of shared memory by kernel."""
    from tandem.cache.kernels.compressed.attend import ENTRIES_PER_TILE, HEADS_PER_PROGRAM, SHARES_PER_TILE, _attend
    from tandem.cache.kernels.compressed.attend import _merge as merge
    from tandem.cache.kernels.compressed.compress import POSITIONS_PER_TILE, _compress
    from tandem.cache.kernels.compressed.rotate import HEADS_PER_PROGRAM as HEADS_TO_ROTATE
    from tandem.cache.kernels.compressed.rotate import _rotate_and_append

    types, report = {**PAGES, **TOKENS, **NUMBERS, "scale": "fp32"}, Report()
    sizes = {"SIZE": SIZE, "ROTATED": ROTATED, "PDL": True}
    for name, size, every, halves in (("csa", SIZE, 4, 2), ("keys", KEY_SIZE, 4, 2), ("hca", SIZE, 128, 1)):
        width = 2 * (SIZE + KEY_SIZE) if halves == 2 else SIZE
        fixed = {**sizes, "SIZE": size, "WIDTH": width, "BEGIN": 2 * SIZE if name == "keys" else 0, "EVERY": every}
        fixed |= {"COUNT": every * halves, "HALVES": halves, "INPUT_PAGE_SIZE": PAGE, "ENTRY_PAGE_SIZE": PAGE}
        one = taken(_compress, fixed | {"TILE": POSITIONS_PER_TILE}, types | COMPRESS)
        report[f"compress {name}"] = one.registers, one.shared_bytes
    fixed = {**sizes, "HEADS": HEADS_TO_ROTATE, "PAGE_SIZE": PAGE}
    for name, appends, its in (("append", True, types), ("queries", False, {**types, "slots": "*bf16"})):
        one = taken(_rotate_and_append, {**fixed, "APPENDS": appends}, its)
        report[f"rotate {name}"] = one.registers, one.shared_bytes
    fixed = {**sizes, "HEADS": HEADS_PER_PROGRAM, "PAGE_SIZE": PAGE, "BESIDE_PAGE_SIZE": PAGE, "WINDOW": WINDOW}
    fixed |= {"ENTRIES": ENTRIES_PER_TILE}
    for beside, chooses in ((False, False), (True, False), (True, True)):
        for shared in (False, True):
            kind = {"BESIDE": beside, "CHOOSES": chooses, "SHARED": shared}
            its = types if shared else {**types, "found": "*bf16"}
            one = taken(_attend, fixed | kind, its, num_warps=WARPS, num_stages=2)
            report[f"attend {kind}"] = one.registers, one.shared_bytes
    for shares in (4, 64):
        one = taken(merge, {**sizes, "TILE": min(shares, SHARES_PER_TILE), "SHARES": shares}, {**types, "found": F32})
        report[f"merge {shares}"] = one.registers, one.shared_bytes
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    return told_by(__name__)


def test_all_compile_and_fit(report: Report) -> None:
    assert len(report) == 13
    assert all(shared <= SHARED_BYTES for _, shared in report.values()), report


def test_none_spills_and_two_fit(report: Report) -> None:
    """Programs at once on a multiprocessor."""
    assert all(registers < MOST_REGISTERS for registers, _ in report.values()), report
    assert all(2 * registers * THREADS <= REGISTERS for registers, _ in report.values()), report


if __name__ == "__main__":
    print(json.dumps(compiled()))
