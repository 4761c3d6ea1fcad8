"""Tests that the benchmark of layers with spans counts correctly, and that all of it runs on a CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.workers.models.config import ModelConfig
from tandem.workers.models.registry import load_config
from tests.benchmarks import spans
from tests.benchmarks.span_shapes import SHAPES


def config_of(name: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SHAPES[name].fields(tiny=False)))
    return load_config(folder, "bfloat16")


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("gemma3-12b", 10 * 1024 + 2 * 10_001),
        ("gpt-oss-20b", 6 * 128 + 6 * 10_001),
        ("llama4-scout", 6 * (10_001 - 8192) + 2 * 10_001),
    ],
)
def test_bytes_are_those_of_the_positions_that_layers_see(name: str, entries: int, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    each = 2 * config.num_kv_heads * config.head_dim * 2
    assert spans.kv_bytes(config, np.array([10_000])) == entries * each
    assert spans.kv_bytes(config, np.array([10_000, 10_000])) == 2 * entries * each


def test_weights_are_those_of_the_experts_that_tokens_choose(tmp_path: Path) -> None:
    """One token reads one of Llama 4's 16 experts, and nothing of the embedding."""
    config = config_of("llama4-scout", tmp_path)
    weights = spans.count_weights(SHAPES["llama4-scout"].fields(tiny=False))
    expert = 3 * 5120 * 8192
    others = 8 * ((40 + 2 * 8 + 40) * 128 * 5120 + expert + 16 * 5120) + 202_048 * 5120
    one, many = (spans.weight_bytes(config, weights, rows) for rows in (1, 10_000))
    assert one == pytest.approx(2 * (others + 8 * expert), rel=1e-4)
    assert many == pytest.approx(2 * (others + 8 * 16 * expert), rel=1e-4)


def test_all_parts_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["spans", "--tiny", "--device", "cpu", "--models", "gpt-oss-20b"])
    spans.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)["gpt-oss-20b"]
    assert result.keys() == {"prefix of 96", "step of 2 at 128"}
    assert result["step of 2 at 128"]["to_floor"] > 0
    assert result["prefix of 96"]["hit_s"] > 0
