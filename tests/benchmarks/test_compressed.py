"""Tests that the benchmark of DeepSeek-V4's layers counts bytes correctly, and that all of it runs on a CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.registry import load_config
from tests.benchmarks import compressed
from tests.benchmarks.compressed_shapes import SHAPES
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.measured import Measured

PROMPT = "prefill of 48 by 32"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """Returns what the benchmark prints for the tiny shape on a CPU."""
    tiny = ["compressed", "--shape", "tiny", "--device", "cpu", "--rows", "2", "--contexts", "128,256"]
    monkeypatch.setattr("sys.argv", [*tiny, "--prompt", "48", "--chunk", "32", *options])
    compressed.main()
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def v4(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["v4"].compressed))
    return load_config(tmp_path, "bfloat16")


def test_bytes_are_those_of_the_window_and_of_entries(v4: ModelConfig) -> None:
    """Rows of 100 positions, of which none chooses, and of 8192."""
    lengths = np.array([100, 8192])
    window = (100 + 128) * 512 * 2
    assert compressed.read_bytes(v4, "window", lengths) == window
    assert compressed.read_bytes(v4, "HCA", lengths) == window + 64 * 512 * 2
    chosen, keys = (25 + 512) * 512 * 2, 2048 * 128 * 2
    assert compressed.read_bytes(v4, "CSA", lengths) == window + chosen + keys


def test_all_parts_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(monkeypatch, capsys, "--kernels")
    for context in (128, 256):
        of_kinds = result[f"attention of 2 at {context}"]
        assert list(of_kinds) == ["window", "HCA", "CSA"]
        assert all(numbers["to_floor"] > 0 for numbers in of_kinds.values())
        assert all(of_kinds[kind]["completing_us"] > 0 for kind in ("HCA", "CSA"))
        assert result[f"step of 2 at {context}"]["ms"] > 0
    assert result[PROMPT]["to_dense"] == pytest.approx(result[PROMPT]["s"] / result[f"dense {PROMPT}"]["s"], rel=0.01)
    assert len(result["targets"]) == 4


@pytest.mark.long
def test_a_case_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = compressed.ModelBench.decode

    def failing(bench: compressed.ModelBench, contexts: Lengths) -> Measured:
        with bench.stored(contexts):
            if contexts[0] == 256:
                raise RuntimeError("no memory")
        return decode(bench, contexts)

    monkeypatch.setattr(compressed.ModelBench, "decode", failing)
    result = run(monkeypatch, capsys, "--contexts", "256,128", "--parts", "step,prefill")
    assert result["step of 2 at 256"] == {"error": "RuntimeError: no memory"}
    assert result["step of 2 at 128"]["ms"] > 0
    assert "growth of a step of 2" not in result
    assert result[PROMPT]["s"] > 0
