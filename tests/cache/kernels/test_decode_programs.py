"""How many programs of the decode kernel stand on a Hopper multiprocessor, of steps of few sequences: two."""

import json

import pytest

from tests.support.hopper import GRANULE, REGISTERS, SHARED_BYTES, Taken, taken, told_by

pytest.importorskip("triton")

from tandem.cache.kernels.triton.decode import _decode
from tandem.cache.kernels.triton.decode_plan import FEW, FEW_FP8, Tiling

pytestmark = pytest.mark.long

TYPES = dict.fromkeys(("slots", "kv_indices", "schedule", "counters", "preceding"), "*i32")
TYPES |= {"partial": "*fp32", "scale": "fp32", "softcap": "fp32", "eps": "fp32", "entries": "i32"}
OF_FP8 = {"pool": "*fp8e4nv", "factors": "*fp32", "inverse": "*fp32"}
FIXED = {"KV_HEADS": 8, "GROUP": 4, "ROWS": 16, "FEW_ROWS": 4, "PAGE_SIZE": 16, "MOST_SPLITS": 32}
FIXED |= {"READ": False, "RUNS": False, "WINDOW": 0, "PACK": 1}
FIXED |= {"CAPPED": False, "SINKS": False, "NORM": True, "ROUND": True, "ROTATE": True, "PTX": True, "PDL": True}
VERIFIES = {"RUNS": True, "PACK": 4, "FEW_ROWS": 16}
CASES = {
    "64": (64, FEW[64], False, {}),
    "128": (128, FEW[128], False, {}),
    "64, 8 bits": (64, FEW_FP8[64], True, {}),
    "128, 8 bits": (128, FEW_FP8[128], True, {}),
    "256, 8 bits": (256, FEW_FP8[256], True, {}),
    "128, drafts": (128, FEW[128], False, VERIFIES),
}


def programs(head_dim: int, tiling: Tiling, fp8: bool, others: dict[str, int]) -> tuple[int, int]:
    """Returns the programs that the shared memory has room for, and the registers."""
    fixed = {
        **FIXED,
        **others,
        "HEAD_DIM": head_dim,
        "HALF": head_dim // 2,
        "BLOCK": tiling.block,
        "FP8": fp8,
        "TWO": tiling.two,
    }
    types = TYPES | (OF_FP8 if fp8 else {})
    one: Taken = taken(_decode, fixed, types, num_warps=tiling.warps, num_stages=tiling.stages)
    registers = -(-one.registers // GRANULE) * GRANULE * 32 * tiling.warps
    return SHARED_BYTES // one.shared_bytes, REGISTERS // registers


def test_they_are_two() -> None:
    """Three on some and one on others take up to 5 % longer of a step (docs/decisions/0020)."""
    found = told_by(__name__)
    assert {name: by_memory for name, (by_memory, _) in found.items()} == dict.fromkeys(CASES, 2)
    assert all(by_registers >= 2 for _, by_registers in found.values()), found


if __name__ == "__main__":
    print(json.dumps({name: programs(*case) for name, case in CASES.items()}))
