"""The kernels of recurrent states, compiled for Hopper in the sizes of published models: the interpreter of Triton
knows no limits of a multiprocessor."""

import json
from typing import Any

import pytest

from tandem.cache.kernels.delta import chunk_rows
from tandem.cache.kernels.delta.heads import Heads
from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, SsdShape, StateShape
from tandem.cache.kernels.torch.delta_rule import CHUNK
from tests.support.hopper import SHARED_BYTES, taken, told_by

pytestmark = pytest.mark.long

SHAPES: dict[str, StateShape] = {
    "Qwen3-Next-80B-A3B": DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, tail=3),
    "Kimi-Linear-48B-A3B": KdaShape(key_heads=32, value_heads=32, key_dim=128, value_dim=128, tail=3),
    "Nemotron-H-8B": SsdShape(num_heads=128, groups=8, head_dim=64, state_size=128, tail=3),
}
I32, F32 = "*i32", "*fp32"
KERNELS = {"_step_conv", "_step_rule", "_run_conv", "_run_rule", "conv_chunks", "solve_chunks", "scan_chunks"}
MOST_REGISTERS = 255  # of a thread; more are kept in memory


def compile_all(shape: StateShape, dtype: str) -> dict[str, tuple[int, int]]:
    """Registers of a thread and bytes of shared memory of a program of each kernel. dtype: of the model."""
    from tandem.cache.kernels.delta import chunks, convolution, runs, scan, solve, solve_rows, steps

    heads = Heads.of(shape)
    tables = dict.fromkeys(("pages", "behind", "kept", "tokens", "preceding", "sequences", "chunks"), I32)
    kept = "log_decay", "strength", "kept_decay", "kept_strength"
    floats = dict.fromkeys((*kept, "pool", "skip", "since", "until"), F32) | dict.fromkeys(("scale", "eps"), "fp32")
    made = "mixed", "w", "added", "scores", "kept_raw"
    of_model = dict.fromkeys((*made, "conv", "bias", "output", "raw"), f"*{dtype}")
    counts = dict.fromkeys(("num_rows", "first_layer", "channel_layer", "decay_layer", "strength_layer"), "i32")
    types: dict[str, str] = {**tables, **floats, **of_model, **counts}
    tiling, padded = chunks.FLOATS if dtype == "fp32" else chunks.HALVES, (heads.keys, heads.values)
    fixed = {name.upper(): value for name, value in heads._asdict().items()}
    fixed |= {"CHUNK": CHUNK, "KEYS": heads.keys, "VALUES": heads.values, "STATE": heads.state_at, "PDL": True}
    fixed |= {"CHUNK_FIELDS": chunk_rows.CHUNK_FIELDS, "SEQUENCE_FIELDS": chunk_rows.SEQUENCE_FIELDS}
    fixed |= {"LEVELS": chunks.LEVELS, "PRECISION": tiling.precision}
    if heads.is_delta:
        fixed |= {"bias": None, "skip": None}
    conv = {"CHANNELS": heads.channels, "TAPS": heads.tail + 1, "BLOCK": steps.CHANNELS, "HEADS": heads.value_heads}
    conv |= {"DECAYS": heads.decays, "DECAY_BLOCK": 256, "HEAD_BLOCK": heads.value_heads}
    alone: dict[str, Any] = {"IN_ORDER": True, "tokens": None}
    solved = tiling.row_solved if heads.by_row else tiling.solved
    solving = {"num_warps": tiling.row_warps if heads.by_row else tiling.warps, "num_stages": 1}
    programs: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
        "_step_conv": (steps._step_conv, {**conv, **alone}, {}),
        "_step_rule": (steps._step_rule, {**alone, "VALUES": steps.VALUES}, {}),
        "_run_conv": (runs._run_conv, conv, {}),
        "_run_rule": (
            runs._run_rule,
            {"WIDTH": heads.values, "VALUES": steps.VALUES, "ROWS": 64, "FINDS": True},
            {},
        ),
        "conv_chunks": (convolution.conv_chunks, {"WIDTH": max(padded), "ROWS": tiling.rows}, {}),
        "solve_chunks": (
            solve_rows.solve_row_chunks if heads.by_row else solve.solve_chunks,
            {"WIDTH": min(solved, *padded)},
            solving,
        ),
        "scan_chunks": (
            scan.scan_chunks,
            {"WIDTH": min(tiling.scanned, heads.values)},
            {"num_warps": tiling.warps, "num_stages": tiling.stages},
        ),
    }
    found = {}
    for name, (kernel, values, launch) in programs.items():
        used = {key: value for key, value in {**fixed, **values}.items() if key in kernel.arg_names}
        one = taken(kernel, used, types, **launch)
        found[name] = one.registers, one.shared_bytes
    return found


def test_a_program_fits_on_a_multiprocessor() -> None:
    """In 16 bits the kernels of the gated delta rule keep all numbers in registers."""
    for model, of_model in told_by(__name__).items():
        for dtype, found in of_model.items():
            assert found.keys() == KERNELS
            for name, (registers, shared_bytes) in found.items():
                assert registers < MOST_REGISTERS or isinstance(SHAPES[model], KdaShape), (model, dtype, name)
                assert shared_bytes <= SHARED_BYTES, (model, dtype, name)


if __name__ == "__main__":
    print(
        json.dumps(
            {model: {dtype: compile_all(shape, dtype) for dtype in ("bf16", "fp32")} for model, shape in SHAPES.items()}
        )
    )
