"""How cubins are compiled and kept, by a compiler that only writes down its orders; which models megakernel.cu serves.

Where there is an nvcc, no GPU needed, this checkout's own files are compiled too.
"""

import re
import shutil
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cache.plan.kv_scales import FP8
from tandem.transfer.island_ranks import MAX_GPU_RANKS
from tandem.workers.kernels.base import Linear, ScaledLinear
from tandem.workers.kernels.cuda.cubin_build import Cubin, build_cubin, find_cubin, load_cubin
from tandem.workers.kernels.decode_megakernel.megakernel import (
    ROW_COUNTS,
    SOURCE,
    WARPS,
    MegakernelArguments,
    MegakernelLayer,
    MegakernelShape,
)
from tandem.workers.kernels.skinny_gemm.resident import SOURCE as RESIDENT
from tandem.workers.kernels.skinny_gemm.resident import ResidentArguments, ResidentShape
from tandem.workers.kernels.skinny_gemm.streamed import SOURCE as STREAMED
from tandem.workers.kernels.skinny_gemm.streamed import TILINGS, streamed_defines
from tandem.workers.ranks.device_ranks import NAMES, exchange_defines
from tandem.workers.ranks.device_ranks import SOURCE as EXCHANGE

QWEN3 = MegakernelShape(1024, 3072, 16, 8, 128, 151936, torch.bfloat16, torch.bfloat16, stored=torch.bfloat16)
BLOCKS = 132
RESIDENT_DEFINES = ResidentShape(1024, 3072, 2048, 4096, torch.bfloat16).defines(BLOCKS)
SUMS = ("sum_at_once", "sum_by_parts", "sum_streamed_2", "sum_streamed_4", f"sum_streamed_{MAX_GPU_RANKS}")
EXCHANGE_KERNELS = [f"{how}_{name}" for how in SUMS for name in NAMES.values()]
RESIDENT_KERNELS = [f"{name}_{tiles}" for name in ("qkv", "o", "gate_up", "down") for tiles in (1, 2)]
# Its arguments end with `-o FILE`.
NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo 13.0; exit; fi
if [ "$1" = -broken ]; then echo no such thing >&2; exit 1; fi
echo "$*" >> "$(dirname "$0")/calls"
for last; do :; done
echo compiled > "$last"
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler on the PATH."""
    compiler = tmp_path / "toolkit" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text(NVCC)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/usr/bin:/bin")
    return compiler


def test_each_shape_is_compiled_once(nvcc: Path, tmp_path: Path) -> None:
    folder, narrow = tmp_path / "cache", replace(QWEN3, hidden=512)
    for shape in (QWEN3, narrow, QWEN3):
        cubin = Cubin(SOURCE, shape.defines(BLOCKS, 16, 1), "90")
        assert build_cubin(cubin, folder).read_bytes() == b"compiled\n"
    calls = (nvcc.parent / "calls").read_text().splitlines()
    assert ["-DHIDDEN=1024" in call for call in calls] == [True, False]
    assert all("code=sm_90" in call for call in calls)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.gate("resident-bfloat16")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH")
@pytest.mark.parametrize(
    ("source", "defines", "arch", "kernels"),
    [
        (SOURCE, QWEN3.defines(BLOCKS, WARPS, 1), "90", ["decode_megakernel"]),
        (SOURCE, QWEN3.defines(BLOCKS, WARPS, 8), "90", ["decode_megakernel"]),
        (SOURCE, replace(QWEN3, stored=FP8).defines(BLOCKS, WARPS, 2), "90", ["decode_megakernel"]),
        (SOURCE, replace(QWEN3, weights=FP8).defines(BLOCKS, WARPS, 1), "90", ["decode_megakernel"]),
        (SOURCE, replace(QWEN3, weights=FP8).defines(BLOCKS, WARPS, 4), "90", ["decode_megakernel"]),
        (STREAMED, streamed_defines(torch.float16), "90a", [tiling.kernel for tiling in TILINGS]),
        (RESIDENT, RESIDENT_DEFINES, "90", RESIDENT_KERNELS),
        (EXCHANGE, exchange_defines(), "90", EXCHANGE_KERNELS),
    ],
    ids=[
        *("one-row-bfloat16", "rows-bfloat16", "rows-8-bits", "one-row-weights", "rows-weights"),
        *("streamed-float16", "resident-bfloat16", "exchange"),
    ],
)
def test_a_compiler_takes_them(
    tmp_path: Path, source: Path, defines: Sequence[str], arch: str, kernels: list[str]
) -> None:
    cubin = build_cubin(Cubin(source, tuple(defines), arch), tmp_path).read_bytes()
    assert all(f".text.{kernel}\0".encode() in cubin for kernel in kernels)


def test_it_is_compiled_anew_when_what_it_includes_has_changed(nvcc: Path, tmp_path: Path) -> None:
    source = tmp_path / "sources" / "one.cu"
    source.parent.mkdir()
    texts = {"one.cu": '#include "two.cuh"', "two.cuh": '#include "three.cuh"\n#include <cuda.h>'}
    texts |= {"three.cuh": '#pragma once\n#include "two.cuh"', "four.cuh": ""}
    for name, text in texts.items():
        (source.parent / name).write_text(text)
    made = []
    for changed in (None, "four.cuh", "three.cuh", "one.cu"):
        if changed is not None:
            (source.parent / changed).write_text(texts[changed] + "\n// changed")
        build_cubin(Cubin(source, (), "90a"), tmp_path / "cache")
        made.append(len((nvcc.parent / "calls").read_text().splitlines()))
    assert made == [1, 1, 2, 3]


def test_a_host_without_nvcc_takes_what_another_has_compiled(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    cubin, other = (Cubin(SOURCE, QWEN3.defines(BLOCKS, 16, rows), "90") for rows in (1, 2))
    built = build_cubin(cubin, folder)
    nvcc.write_text(NVCC.replace("13.0", "13.1"))
    assert find_cubin(cubin, folder) is None  # another nvcc compiles anew
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_cubin(cubin, folder) == build_cubin(cubin, folder) == built
    assert find_cubin(other, folder) is None


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_without_it_there_is_a_warning(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    if fault == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        nvcc.write_text(NVCC.replace("-broken", "-std=c++17"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load_cubin(Cubin(SOURCE, QWEN3.defines(BLOCKS, 16, 1), "90"), "others serve") is None
    reason = "nvcc is not on the PATH" if fault == "missing" else "no such thing"
    assert f"megakernel.cu is not there, others serve: {reason}" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"stored": torch.float16},
        {"weights": torch.float16},
        {"weights": FP8, "hidden": 1032},
        {"head_dim": 80},
        {"kv_heads": 1},
        {"hidden": 1028},
        {"intermediate": 3076},
        {"vocab": 151937},
        {"hidden": 256},
        {"vocab": 260},
    ],
    ids=str,
)
def test_what_does_not_fit(change: dict[str, Any]) -> None:
    assert QWEN3.fits(BLOCKS, 1)
    assert replace(QWEN3, stored=FP8).fits(BLOCKS, 1)
    assert replace(QWEN3, weights=FP8).fits(BLOCKS, 1)
    assert replace(QWEN3, hidden=1032).fits(BLOCKS, 1)
    assert not replace(QWEN3, **change).fits(BLOCKS, 1)


def scaled(rows: int, columns: int, row_block: int, group: int) -> ScaledLinear:
    scales = torch.ones(-(-rows // row_block), -(-columns // group))
    return ScaledLinear(torch.zeros(rows, columns, dtype=FP8), scales=scales, row_block=row_block, group=group)


def test_which_scales_the_megakernel_takes() -> None:
    norm, bias, plain = torch.ones(256), torch.zeros(256), Linear(torch.zeros(256, 256))

    def layer(*products: Linear) -> MegakernelLayer | None:
        return MegakernelLayer.of(products, norm, norm, None)

    blocks, rows, whole = scaled(256, 256, 128, 128), scaled(256, 256, 1, 128), scaled(256, 256, 1, 256)
    made = layer(blocks, rows, whole, blocks)
    assert made is not None
    assert made.scaling == 0x71_00_01_71
    assert made.down_scales is blocks.scales
    made = layer(replace(plain, bias=bias), plain, plain, plain)
    assert made is not None
    assert made.scaling == 0
    assert made.qkv_bias is bias
    assert layer(replace(blocks, bias=bias), blocks, blocks, blocks) is not None
    for other in (plain, scaled(256, 256, 128, 64), scaled(256, 256, 96, 128), replace(blocks, bias=bias)):
        assert layer(blocks, other, blocks, blocks) is None


@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 8),
        ({"hidden": 512}, 1),
        ({"vocab": 151938}, 1),
        ({"kv_heads": 32, "q_heads": 32}, 4),
        ({"hidden": 4096, "intermediate": 12288, "q_heads": 32}, 8),
        ({"hidden": 8192}, 4),
    ],
    ids=str,
)
def test_how_many_rows_fit(change: dict[str, Any], most: int) -> None:
    shape = replace(QWEN3, **change)
    assert [rows for rows in ROW_COUNTS if shape.fits(BLOCKS, rows)] == [rows for rows in ROW_COUNTS if rows <= most]


@pytest.mark.parametrize(
    ("header", "arguments"),
    [(SOURCE.with_name("shape.cuh"), MegakernelArguments), (RESIDENT, ResidentArguments)],
    ids=["megakernel", "resident"],
)
def test_host_and_device_pass_the_same_fields_in_the_same_order(header: Path, arguments: type[Structure]) -> None:
    struct = header.read_text().split("struct Arguments {")[1].split("};")[0]
    declarations = [line.partition("//")[0].strip().rstrip(";") for line in struct.splitlines()]
    names = [name.partition("[")[0].strip() for line in declarations if line for name in line.split(",")]
    fields = [re.split(r"[ *]", name)[-1] for name in names]
    assert fields == [field[0] for field in arguments._fields_]
