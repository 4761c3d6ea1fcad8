"""The kernels of a gated delta rule, compiled for Hopper in the sizes of Qwen3-Next-80B-A3B: the interpreter of Triton
knows no limits of a multiprocessor."""

import json
from typing import Any

import pytest

from tests.support.hopper import SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "PDL": True}
I32, F32 = "*i32", "*fp32"
KERNELS = {"_step_conv", "_step_rule", "_run_conv", "_run_rule", "_conv_chunks", "_solve_chunks", "_scan_chunks"}
MOST_REGISTERS = 255  # of a thread; more are kept in memory


def compile_all(dtype: str) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes of shared memory of a program of each kernel. dtype: of the model."""
    from tandem.cache.kernels.delta import chunks, runs, steps

    tables = dict.fromkeys(("pages", "behind", "kept", "tokens", "preceding", "sequences", "pieces", "chunks"), I32)
    floats = dict.fromkeys(("pool", "log_decay", "beta", "kept_decay", "kept_beta", "totals"), F32) | dict.fromkeys(
        ("scale", "eps"), "fp32"
    )
    of_model = dict.fromkeys(("mixed", "conv", "output", "w", "u", "scores", "raw", "kept_raw"), f"*{dtype}")
    counts = dict.fromkeys(("num_rows", "first_layer", "channel_layer", "rate_layer"), "i32")
    types: dict[str, str] = {**tables, **floats, **of_model, **counts}
    chunked = {**HEADS, "TAIL": 3, "CHUNK": 64, "CHUNK_FIELDS": chunks.CHUNK_FIELDS}
    chunked |= {"SEQUENCE_FIELDS": chunks.SEQUENCE_FIELDS, "PIECE_FIELDS": chunks.PIECE_FIELDS}
    tiling = chunks.FLOATS if dtype == "fp32" else chunks.HALVES
    precise, options = {"PRECISION": tiling.precision}, {"num_warps": tiling.warps, "num_stages": tiling.stages}
    state = 3 * 8192
    fixed: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
        "_step_conv": (
            steps._step_conv,
            {"CHANNELS": 8192, "TAPS": 4, "BLOCK": steps.CHANNELS, "IN_ORDER": True, "tokens": None, "PDL": True},
            {},
        ),
        "_step_rule": (
            steps._step_rule,
            {**HEADS, "STATE": state, "KEYS": 128, "VALUES": steps.VALUES, "IN_ORDER": True, "tokens": None},
            {},
        ),
        "_run_conv": (
            runs._run_conv,
            {"CHANNELS": 8192, "TAPS": 4, "BLOCK": steps.CHANNELS, "HEADS": 32, "HEAD_BLOCK": 32, "PDL": True},
            {},
        ),
        "_run_rule": (
            runs._run_rule,
            {**HEADS, "STATE": state, "TAIL": 3, "KEYS": 128, "WIDTH": 128, "VALUES": steps.VALUES}
            | {"ROWS": 64, "FINDS": True},
            {},
        ),
        "_conv_chunks": (chunks._conv_chunks, {**chunked, "WIDTH": 128, "ROWS": chunks.ROWS}, {}),
        "_solve_chunks": (
            chunks._solve_chunks,
            {**chunked, **precise, "KEYS": 128, "VALUES": 128, "WIDTH": tiling.width, "BLOCK": chunks.BLOCK},
            options,
        ),
        "_scan_chunks": (
            chunks._scan_chunks,
            {**chunked, **precise, "STATE": state, "KEYS": 128, "VALUES": tiling.values},
            options,
        ),
    }
    found = {}
    for name, (kernel, values, launch) in fixed.items():
        used = {key: value for key, value in values.items() if key in kernel.arg_names}
        one = taken(kernel, used, types, **launch)
        found[name] = one.registers, one.shared_bytes
    return found


def test_a_program_fits_on_a_multiprocessor() -> None:
    for dtype, found in told_by(__name__).items():
        assert found.keys() == KERNELS
        for name, (registers, shared_bytes) in found.items():
            assert registers < MOST_REGISTERS, (dtype, name)
            assert shared_bytes <= SHARED_BYTES, (dtype, name)


if __name__ == "__main__":
    print(json.dumps({dtype: compile_all(dtype) for dtype in ("bf16", "fp32")}))
