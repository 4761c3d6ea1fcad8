"""Which models row_step.cu serves, and how it is compiled and kept: by a compiler that only writes down its orders."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.workers.kernels.row_step import RowStepShape
from tandem.workers.kernels.row_step_build import build_row_step, load_row_step

QWEN3 = RowStepShape(1024, 3072, 16, 8, 128, 151936, torch.bfloat16)
HOPPER, BLOCKS = (9, 0), 132
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
        assert build_row_step(folder, shape.defines(BLOCKS, 16), HOPPER) == b"compiled\n"
    calls = (nvcc.parent / "calls").read_text().splitlines()
    assert ["-DHIDDEN=1024" in call for call in calls] == [True, False]
    assert all("code=sm_90" in call for call in calls)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_without_it_there_is_a_warning(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    if fault == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        nvcc.write_text(NVCC.replace("-broken", "-std=c++17"))
    assert load_row_step(tmp_path / "cache", QWEN3.defines(BLOCKS, 16), HOPPER) is None
    assert ("nvcc is not on the PATH" if fault == "missing" else "no such thing") in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"head_dim": 80},
        {"kv_heads": 1},
        {"hidden": 1028},
        {"inner": 3076},
        {"vocab": 151937},
        {"hidden": 256},
        {"vocab": 260},
    ],
    ids=str,
)
def test_what_does_not_fit(change: dict[str, int]) -> None:
    assert QWEN3.fits(BLOCKS)
    assert not replace(QWEN3, **change).fits(BLOCKS)
