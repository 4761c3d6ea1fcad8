"""Measures what a Triton kernel takes of a Hopper multiprocessor. Triton compiles for it without a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTERS, GRANULE = 1 << 16, 8  # a thread gets a multiple of 8
SHARED_BYTES = 228 * 1024
STRIDES = ("_token", "_head", "_apart", "_elements")  # how names end of numbers that can be divided by 16


@dataclass(frozen=True)
class Taken:
    """The resources that a program takes. registers: of a thread; shared_bytes: with the system's own; narrow_loads:
    instructions that load less than 4 bytes from memory, which Triton writes where it knows of no better alignment."""

    registers: int
    shared_bytes: int
    narrow_loads: int


def taken(kernel: Any, fixed: Mapping[str, Any], types: Mapping[str, str], **options: Any) -> Taken:
    """Compiles the kernel; not under Triton's interpreter. fixed: constexprs by the parameter's name; types: of the
    others, but for pointers to bfloat16 and STRIDES."""
    from triton import compile as compile_kernel
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], values[(place,)] = "constexpr", fixed[name]
            continue
        signature[name] = types.get(name, "i32" if name.endswith(STRIDES) else "*bf16")
        if signature[name].startswith("*") or name.endswith(STRIDES):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=divisible)
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True, **options})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) .*SHARED:(\d+)", printed)
    assert found is not None, printed
    narrow = len(re.findall(r"ld\.global\S*\.[bus](?:8|16)\b", compiled.asm["ptx"]))
    return Taken(int(found[1]), int(found[2]) + compiled.metadata.shared, narrow)


def told_by(module: str) -> Any:
    """Returns the JSON that a module prints, in a process without Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
