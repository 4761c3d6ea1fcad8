"""The kernels of a gated delta rule, compiled for Hopper in the sizes of Qwen3-Next-80B-A3B: the interpreter of Triton
knows no limits of a multiprocessor."""

import json
from typing import Any

import pytest

from tests.support.hopper import SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

HEADS = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "PDL": True}
CHANNELS = {"TAIL": 3, "QUERY_AT": 0, "KEY_AT": 2048, "VALUE_AT": 4096}
I32, F32 = "*i32", "*fp32"
KERNELS = {"_step_conv", "_step_rule", "_run_conv", "_run_rule"}
KERNELS |= {"conv_chunks", "solve_chunks", "scan_chunks", "read_chunks"}
MOST_REGISTERS = 255  # of a thread; more are kept in memory


def compile_all(dtype: str) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes of shared memory of a program of each kernel. dtype: of the model."""
    from tandem.cache.kernels.delta import chunk_rows, chunks, convolution, runs, scan, solve, steps

    tables = dict.fromkeys(("pages", "behind", "kept", "tokens", "preceding", "sequences", "chunks"), I32)
    floats = dict.fromkeys(
        ("pool", "log_decay", "beta", "kept_decay", "kept_beta", "since", "until"), F32
    ) | dict.fromkeys(("scale", "eps"), "fp32")
    of_model = dict.fromkeys(
        ("mixed", "conv", "output", "w", "added", "scores", "states", "raw", "kept_raw"), f"*{dtype}"
    )
    counts = dict.fromkeys(("num_rows", "first_layer", "channel_layer", "rate_layer"), "i32")
    types: dict[str, str] = {**tables, **floats, **of_model, **counts}
    tiling, state = chunks.FLOATS if dtype == "fp32" else chunks.HALVES, 3 * 8192
    chunked = {**HEADS, **CHANNELS, "CHUNK": 64, "KEYS": 128, "VALUES": 128, "STATE": state, "BLOCK": chunks.BLOCK}
    chunked |= {"CHUNK_FIELDS": chunk_rows.CHUNK_FIELDS, "SEQUENCE_FIELDS": chunk_rows.SEQUENCE_FIELDS}
    chunked |= {"PRECISION": tiling.precision}
    options = {"num_warps": tiling.warps}
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
            {**HEADS, **CHANNELS, "STATE": state, "KEYS": 128, "WIDTH": 128, "VALUES": steps.VALUES}
            | {"ROWS": 64, "FINDS": True},
            {},
        ),
        "conv_chunks": (convolution.conv_chunks, {**chunked, "WIDTH": 128, "ROWS": tiling.rows}, {}),
        "solve_chunks": (solve.solve_chunks, {**chunked, "WIDTH": tiling.solved}, options),
        "scan_chunks": (
            scan.scan_chunks,
            {**chunked, "WIDTH": tiling.scanned},
            {**options, "num_stages": tiling.stages},
        ),
        "read_chunks": (scan.read_chunks, {**chunked, "WIDTH": tiling.read}, options),
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
