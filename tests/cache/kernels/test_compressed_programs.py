"""The kernels of compressed KV, compiled for Hopper at DeepSeek-V4's sizes: Triton's interpreter takes code that its
compiler refuses, and knows no limits of a multiprocessor."""

import json
from dataclasses import astuple

import pytest
import torch

from tandem.cache.plan.kv_scales import Fp8Rows
from tests.support.hopper import REGISTERS, SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

SIZE, KEY_SIZE, ROTATED, WINDOW, PAGE = 512, 128, 64, 128, 64
THREADS = 128
MOST_REGISTERS = 255  # of a thread, from where on they spill
I32, I64, F32, FP8 = "*i32", "*i64", "*fp32", "*fp8e4nv"
PAGES = {f"{of}{name}": I32 for of in ("", "input_", "entry_", "beside_") for name in ("firsts", "begins")}
PAGES |= {"input_pages": I32, "entry_pages": I32, "kv_indices": I32, "beside_indices": I32, "slots": I32}
NUMBERS = dict.fromkeys(("num_heads", "extra", "all_sums", "shares"), "i32")
TOKENS = {"positions": I64, "preceding": I32, "visible": I32, "chosen": I32, "sinks": F32, "found": F32, "sums": F32}
COMPRESS = {"values": F32, "gates": F32, "bias": F32, "norm": F32, "inputs": F32, "eps": "fp32", "cos": F32, "sin": F32}
Report = dict[str, tuple[int, int, int]]


def compiled() -> Report:
    """Registers of a thread, bytes of shared memory and narrow loads by kernel."""
    from tandem.cache.kernels.compressed.attend import MANY, SHARES_PER_TILE, _attend
    from tandem.cache.kernels.compressed.attend import _merge as merge
    from tandem.cache.kernels.compressed.compress import POSITIONS_PER_TILE, _compress
    from tandem.cache.kernels.compressed.rotate import HEADS_PER_PROGRAM as HEADS_TO_ROTATE
    from tandem.cache.kernels.compressed.rotate import _rotate_and_append
    from tandem.cache.kernels.entry_tiling import FEW
    from tandem.cache.kernels.triton.chosen import FP8_WARPS, _attend_chosen
    from tandem.cache.kernels.triton.chosen import MANY as MANY_CHOSEN
    from tandem.cache.kernels.triton.index_scores import POSITIONS_PER_TILE as POSITIONS_TO_SCORE
    from tandem.cache.kernels.triton.index_scores import _score

    types, report = {**PAGES, **TOKENS, **NUMBERS, "scale": "fp32"}, Report()
    sizes = {"SIZE": SIZE, "ROTATED": ROTATED, "PDL": True}
    for name, size, every, halves in (("csa", SIZE, 4, 2), ("keys", KEY_SIZE, 4, 2), ("hca", SIZE, 128, 1)):
        width = 2 * (SIZE + KEY_SIZE) if halves == 2 else SIZE
        fixed = {**sizes, "SIZE": size, "WIDTH": width, "BEGIN": 2 * SIZE if name == "keys" else 0, "EVERY": every}
        fixed |= {"COUNT": every * halves, "HALVES": halves, "INPUT_PAGE_SIZE": PAGE, "ENTRY_PAGE_SIZE": PAGE}
        one = taken(_compress, fixed | {"TILE": POSITIONS_PER_TILE}, types | COMPRESS)
        report[f"compress {name}"] = astuple(one)
    fixed = {**sizes, "HEADS": HEADS_TO_ROTATE, "PAGE_SIZE": PAGE}
    for name, appends, its in (("append", True, types), ("queries", False, {**types, "slots": "*bf16"})):
        one = taken(_rotate_and_append, {**fixed, "APPENDS": appends}, its)
        report[f"rotate {name}"] = astuple(one)
    fixed = {**sizes, "PAGE_SIZE": PAGE, "BESIDE_PAGE_SIZE": PAGE, "WINDOW": WINDOW}
    reads = (False, False), (True, False), (True, True)
    for name, tiling, its_reads in (("attend", FEW, reads), ("attend by many", MANY, reads[-1:])):
        fixed |= {"HEADS": tiling.heads, "ENTRIES": tiling.entries}
        for beside, chooses in its_reads:
            for shared in (False, True):
                kind = {"BESIDE": beside, "CHOOSES": chooses, "SHARED": shared}
                its = types if shared else {**types, "found": "*bf16"}
                one = taken(_attend, fixed | kind, its, num_warps=tiling.warps, num_stages=tiling.stages)
                report[f"{name} {kind}"] = astuple(one)
    for fp8 in (None, Fp8Rows(SIZE + ROTATED, SIZE, torch.bfloat16)):
        row, group = (SIZE + ROTATED, 0) if fp8 is None else (fp8.num_bytes, fp8.group_columns)
        latents = {"PAGE_SIZE": PAGE, "RANK": SIZE, "ROTATED": ROTATED, "SHARED": True, "PDL": True}
        latents |= {"ROW": row, "GROUP": group}
        its = types | {"which": I32, "num_chosen": "i32"} | ({} if fp8 is None else {"pool": FP8})
        for of in ("", " by many"):
            tiling = MANY_CHOSEN if of else FEW
            warps = tiling.warps if fp8 is None else FP8_WARPS
            fixed = latents | {"HEADS": tiling.heads, "ENTRIES": tiling.entries}
            for chosen in (True, False)[: 1 if fp8 is None else 2]:
                name = f"attend {'chosen' if chosen else 'seen'}{'' if fp8 is None else ' in 8 bits'}{of}"
                given = fixed | {"CHOSEN": chosen}
                one = taken(_attend_chosen, given, its, num_warps=warps, num_stages=tiling.stages)
                report[name] = astuple(one)
        keys = {"HEADS": SIZE // 8, "WIDTH": KEY_SIZE, "COLUMNS": KEY_SIZE, "PAGE_SIZE": PAGE, "PDL": True}
        keys |= {"KEYS": POSITIONS_TO_SCORE, "FP8": fp8 is not None, "ROW": KEY_SIZE + (0 if fp8 is None else 4)}
        its |= {"weights": F32, "lengths": I32, "scores": F32, "longest": "i32"}
        report[f"score{'' if fp8 is None else ' in 8 bits'}"] = astuple(taken(_score, keys, its))
    for shares in (4, 64):
        one = taken(merge, {**sizes, "TILE": min(shares, SHARES_PER_TILE), "SHARES": shares}, {**types, "found": F32})
        report[f"merge {shares}"] = astuple(one)
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    return told_by(__name__)


def test_all_compile_and_fit(report: Report) -> None:
    assert len(report) == 23
    assert all(shared <= SHARED_BYTES for _, shared, _ in report.values()), report


def test_none_for_few_tokens_spills_and_two_fit(report: Report) -> None:
    """Programs at once on a multiprocessor. Those for many tokens have all their sums in registers, and spill some."""
    few = {name: registers for name, (registers, _, _) in report.items() if "by many" not in name}
    assert all(registers < MOST_REGISTERS for registers in few.values()), report
    assert all(2 * registers * THREADS <= REGISTERS for registers in few.values()), report


def test_none_reads_entries_a_value_at_a_time(report: Report) -> None:
    """It would take a thread 64 loads a tile. A few factors of the rotation may be read so."""
    assert all(narrow <= 2 for *_, narrow in report.values()), report


if __name__ == "__main__":
    print(json.dumps(compiled()))
