"""The kernels of heads of 512, compiled for Hopper: Triton's interpreter knows no limits of a multiprocessor."""

import json

import pytest

from tests.support.hopper import SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

I32, F32 = "*i32", "*fp32"
HEADS = {"KV_HEADS": 2, "GROUP": 8, "PAGE_SIZE": 16, "HEAD_DIM": 512, "PDL": True}


def shared_bytes() -> dict[str, int]:
    """Returns the shared memory of each kernel's program, in bytes."""
    from tandem.cache.kernels.paged.prompts import (
        FIELDS,
        KEYS,
        MOST_HEADS,
        STAGES,
        TOKENS,
        WARPS,
        _attend_tiles,
    )
    from tandem.cache.kernels.triton.decode import _decode
    from tandem.cache.kernels.triton.decode_plan import WIDE, WIDE_FP8
    from tandem.cache.kernels.triton.tree import (
        MASK_WORDS,
        NODES_PER_TILE,
        TILE_FIELDS,
        WIDE_HEADS,
        WIDE_KEYS,
        WIDE_WARPS,
        _attend_trees,
    )

    found = {}
    numbers = dict.fromkeys(("scale", "softcap", "eps"), "fp32") | {"entries": "i32"}
    plain = {"SOFTCAP": False, "HAS_SINKS": False, "FP8": False, "sinks": None, "fp8_scales": None}
    tiles = {**HEADS, **plain, "HEADS": MOST_HEADS, "TOKENS": TOKENS, "KEYS": KEYS, "FIELDS": FIELDS, "WINDOW": 0}
    types = {**numbers, "tiles": I32, "kv_indices": I32, "lse": F32}
    found["prompts"] = taken(_attend_tiles, tiles | {"LSE": True}, types, num_warps=WARPS, num_stages=STAGES)
    trees = {**HEADS, **plain, "HEADS": WIDE_HEADS, "KEYS": WIDE_KEYS, "NODES": NODES_PER_TILE}
    trees |= {"FIELDS": TILE_FIELDS, "WORDS": MASK_WORDS}
    types = {**numbers, "tiles": I32, "slots": I32, "masks": I32, "edges": I32, "lse": F32}
    found["trees"] = taken(_attend_trees, trees, types, num_warps=WIDE_WARPS)
    switches = dict.fromkeys(("READ", "RUNS", "CAPPED", "SINKS", "TWO"), False)
    steps = {**HEADS, **switches, "ROWS": 16, "MOST_SPLITS": 32, "WINDOW": 0, "HALF": 256, "PTX": True}
    steps |= dict.fromkeys(("NORM", "ROUND", "ROTATE"), True)
    types = (
        dict.fromkeys(("slots", "kv_indices", "schedule", "counters", "preceding"), I32) | {"partial": F32} | numbers
    )
    of_fp8 = {"pool": "*fp8e4nv", "factors": F32, "inverse": F32}
    for name, tiling, more, pack in (
        ("steps", WIDE, {}, 1),
        ("steps, 8 bits", WIDE_FP8, of_fp8, 1),
        ("steps with drafts", WIDE, {}, 2),
    ):
        fixed = {**steps, "BLOCK": tiling.block, "FP8": bool(more), "RUNS": pack > 1}
        fixed |= {"PACK": pack, "FEW_ROWS": 8 * pack}
        found[name] = taken(_decode, fixed, types | more, num_warps=tiling.warps, num_stages=tiling.stages)
    return {name: one.shared_bytes for name, one in found.items()}


def test_a_program_fits_on_a_multiprocessor() -> None:
    found = told_by(__name__)
    assert found.keys() == {"prompts", "trees", "steps", "steps, 8 bits", "steps with drafts"}
    assert max(found.values()) <= SHARED_BYTES, found


if __name__ == "__main__":
    print(json.dumps(shared_bytes()))
