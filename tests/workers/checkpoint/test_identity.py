"""Checkpoints that differ anywhere are told apart."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.workers.checkpoint.identity import SAMPLE_BYTES, checkpoint_identity


def save(folder: Path, value: float = 1.0, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    tensors = {"large": torch.full((4 * SAMPLE_BYTES,), value), "small": torch.ones(3), "none": torch.ones(0)}
    save_file(tensors, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))
    return folder


def test_equal_checkpoints_are_the_same_wherever_they_are(tmp_path: Path) -> None:
    one, other = (checkpoint_identity(save(tmp_path / name)) for name in "ab")
    assert one == other
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    assert checkpoint_identity(tmp_path / "a") == one


@pytest.mark.parametrize("what", ["weights", "time", "config", "quantization", "file", "format"])
def test_checkpoints_that_differ(what: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    before, load_format = checkpoint_identity(folder), "safetensors"
    match what:
        case "weights":
            save(folder, 1.5)
        case "time":
            os.utime(folder / "model.safetensors", (2, 2))
        case "config":
            save(folder, rope_theta=5.0)
        case "quantization":
            (folder / "hf_quant_config.json").write_text("{}")
        case "file":
            save_file({"more": torch.ones(1)}, folder / "more.safetensors")
        case _:
            load_format = "dummy"
    assert checkpoint_identity(folder, load_format) != before


def test_dummy_weights_follow_from_the_description(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    before = checkpoint_identity(folder, "dummy")
    save(folder, 2.0)
    assert checkpoint_identity(folder, "dummy") == before
    save(folder, rope_theta=5.0)
    assert checkpoint_identity(folder, "dummy") != before
