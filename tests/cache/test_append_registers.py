"""How many registers the append kernel takes on Hopper: Triton compiles it there for any GPU, without one."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

THREADS_OF_FULL, REGISTERS, GRANULE = 2048, 1 << 16, 8  # of a multiprocessor; a thread gets a multiple of 8
POINTERS = {"slots": "*i32", "peer_rows": "*i64", "fp8_factors": "*fp32"}
SIZES = ("page_elements", "layer_elements", "num_q_heads", "num_kv_heads")
FIXED = {"PARTS": 5, "Q_PARTS": 4, "PAGE_SIZE": 16, "HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "HALF_BLOCK": 64}
FIXED |= {"REST_BLOCK": 0, "ROTATE": True, "KEEP_K": False, "PDL": True}
CASES = {"plain": ("*bf16", False, False), "peer": ("*bf16", True, False), "FP8, peer": ("*fp8e4nv", True, True)}


def registers(entries: str, has_peer: bool, fp8: bool) -> int:
    """Of 128 threads with eight heads of Qwen3-8B. Not under Triton's interpreter."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.cache.kernels.triton_append import _append

    fixed = {**FIXED, "HAS_PEER": has_peer, "FP8": fp8}
    fixed |= {} if has_peer else {"peer_rows": None}
    fixed |= {} if fp8 else {"fp8_factors": None}
    signature, values, divisible = {}, {}, {}
    for place, name in enumerate(_append.arg_names):
        if name in fixed:
            signature[name], values[(place,)] = "constexpr", fixed[name]
            continue
        is_size = name in SIZES or name.endswith(("_token", "_head"))
        signature[name] = "i32" if is_size else POINTERS.get(name, entries if name == "pool" else "*bf16")
        if name != "num_kv_heads":
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=_append, signature=signature, constexprs=values, attrs=divisible)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "append.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+)", told)
    assert found is not None, told
    return int(found[1])


def test_a_multiprocessor_is_full() -> None:
    """Three quarters full, the kernel takes 5 % longer (tests/benchmarks/LOG.md)."""
    command = [sys.executable, "-m", "tests.cache.test_append_registers"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    of_thread = {case: -(-taken // GRANULE) * GRANULE for case, taken in json.loads(done.stdout).items()}
    assert all(taken * THREADS_OF_FULL <= REGISTERS for taken in of_thread.values()), of_thread


if __name__ == "__main__":
    print(json.dumps({case: registers(*kind) for case, kind in CASES.items()}))
