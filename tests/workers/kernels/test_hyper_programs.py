"""The kernels of hyper-connections, compiled for Hopper at DeepSeek-V4's sizes: Triton's interpreter takes code that
its compiler refuses, and knows no limits of a multiprocessor."""

import json

import pytest

from tests.support.hopper import REGISTERS, SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

STREAMS, HIDDEN, THREADS = 4, 7168, 128
MOST_REGISTERS = 255  # of a thread, from where on they spill
TYPES: dict[str, str] = dict.fromkeys(("fn", "parts", "base", "scale", "post", "mix"), "*fp32")
TYPES |= dict.fromkeys(("num_tokens", "each", "splits", "iterations"), "i32") | {"eps": "fp32", "norm_eps": "fp32"}
Report = dict[str, tuple[int, int]]


def compiled() -> Report:
    """Registers of a thread and bytes of shared memory by kernel."""
    from triton import language as tl

    from tandem.workers.kernels.triton import hyper

    report = Report()
    sizes = {"COUNT": STREAMS, "STREAMS": STREAMS, "PDL": True}
    tiles = {"bf16": ((hyper.FEW, hyper.COLUMNS_OF_FEW), (hyper.MANY, hyper.COLUMNS_OF_MANY))}
    for dtype in ("bf16", "fp16", "fp32"):
        types: dict[str, str] = TYPES | dict.fromkeys(("streams", "output", "collapsed", "closed"), f"*{dtype}")
        for tokens, block in tiles.get(dtype, ((hyper.FEW, hyper.COLUMNS_OF_EXACT),)):
            for count, rows, is_one in ((24, 32, False), (24, 32, True), (4, hyper.LEAST, False)):
                fixed = {"COLUMNS": STREAMS * HIDDEN, "COUNT": count, "ROWS": rows, "TOKENS": tokens, "BLOCK": block}
                fixed |= {"EVEN": True, "ONE": is_one, "OPERAND": tl.bfloat16, "PDL": True}
                one = taken(hyper._multiply, fixed, types, num_warps=4, num_stages=3)
                report[f"multiply {dtype} {tokens} {count} {is_one}"] = one.registers, one.shared_bytes
        for block in (hyper.HIDDEN_OF_FEW, hyper.HIDDEN_OF_MANY):
            fixed = {**sizes, "HIDDEN": HIDDEN, "BLOCK": block}
            one = taken(hyper._close, fixed, types)
            report[f"close {dtype} {block}"] = one.registers, one.shared_bytes
            for weights, rows, mixes, splits in ((24, 32, True, 128), (4, hyper.LEAST, False, 2)):
                fixed |= {"SPLITS": splits, "WEIGHTS": weights, "ROWS": rows, "MIXES": mixes}
                one = taken(hyper._collapse, fixed, types)
                report[f"collapse {dtype} {block} {splits}"] = one.registers, one.shared_bytes
    return report


@pytest.fixture(scope="module")
def report() -> Report:
    return told_by(__name__)


def test_all_compile_and_fit(report: Report) -> None:
    assert len(report) == 30
    assert all(shared <= SHARED_BYTES for _, shared in report.values()), report


def test_none_spills_and_two_fit(report: Report) -> None:
    """Programs at once on a multiprocessor."""
    assert all(registers < MOST_REGISTERS for registers, _ in report.values()), report
    assert all(2 * registers * THREADS <= REGISTERS for registers, _ in report.values()), report
    assert all(2 * shared <= SHARED_BYTES for _, shared in report.values()), report


if __name__ == "__main__":
    print(json.dumps(compiled()))
