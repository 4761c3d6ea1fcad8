"""How many registers the append kernel takes on Hopper."""

import json

import pytest

from tests.support.hopper import GRANULE, REGISTERS, taken, told_by

THREADS_OF_FULL = 2048  # of a multiprocessor
WARPS = 4
TYPES = {"slots": "*i32", "peer_rows": "*i64", "fp8_factors": "*fp32", "num_q_heads": "i32", "num_kv_heads": "i32"}
FIXED = {"PARTS": 5, "Q_PARTS": 4, "PAGE_SIZE": 16, "HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "HALF_BLOCK": 64}
FIXED |= {"REST_BLOCK": 0, "ROTATE": True, "KEEP_K": False, "PDL": True}
CASES = {"plain": ("*bf16", False, False), "peer": ("*bf16", True, False), "FP8, peer": ("*fp8e4nv", True, True)}


def registers(entries: str, has_peer: bool, fp8: bool) -> int:
    """Returns the registers of 128 threads with eight heads of Qwen3-8B."""
    from tandem.cache.kernels.triton.append import _append

    fixed = {**FIXED, "HAS_PEER": has_peer, "FP8": fp8}
    fixed |= {} if has_peer else {"peer_rows": None}
    fixed |= {} if fp8 else {"fp8_factors": None}
    return taken(_append, fixed, {**TYPES, "pool": entries}, num_warps=WARPS).registers


@pytest.mark.long
def test_a_multiprocessor_is_full() -> None:
    """Three quarters full, the kernel takes 5 % longer (docs/decisions/0017)."""
    of_thread = {case: -(-number // GRANULE) * GRANULE for case, number in told_by(__name__).items()}
    assert all(number * THREADS_OF_FULL <= REGISTERS for number in of_thread.values()), of_thread


if __name__ == "__main__":
    print(json.dumps({case: registers(*kind) for case, kind in CASES.items()}))
