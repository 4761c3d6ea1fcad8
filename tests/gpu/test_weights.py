"""Weights on a GPU: staged through pinned memory, part by part and side by side."""

from pathlib import Path

import pytest
import torch

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import load_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_they_are_those_that_a_cpu_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Weights are read as stored and converted, with more parts than there is room for at a time."""
    monkeypatch.setattr("tandem.workers.checkpoint.safetensors_file.PART_BYTES", 4096)
    make_checkpoint(tmp_path, arch="qwen3", size="tiny", seed=3, shard_bytes=100_000)
    config = load_config(tmp_path, dtype)
    here, there = (
        named_weights(config, load_parameters(tmp_path, config, device=device)) for device in ("cpu", "cuda")
    )
    for name, place in here.items():
        assert torch.equal(there[name].cpu(), place), name
