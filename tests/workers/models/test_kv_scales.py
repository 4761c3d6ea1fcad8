"""Checks which scales a worker takes: the configuration's, the checkpoint's, or 1."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.cluster.config.cluster_config import load_config as load_cluster_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.models.kv_scales import choose_scales, stores_fp8
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tandem.workers.weights.formats.format import Quantization
from tests.support.checkpoints import save_checkpoint

FP8 = "fp8_e4m3"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("plain"))


def with_tensors(plain: Path, folder: Path, **scales: Any) -> Path:
    """A copy of the checkpoint with further tensors of its layers' attention: k_scale of layer 1 is k1."""
    tensors = load_file(plain / "model.safetensors")
    for name, value in scales.items():
        tensors[f"model.layers.{name[1]}.self_attn.{name[0]}_scale"] = torch.tensor(value, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((plain / "config.json").read_text())
    return folder


def chosen(folder: Path, **settings: Any) -> KVScales | None:
    cache = {f"cache.{name}": value for name, value in settings.items()}
    config = worker_configs(load_cluster_config(None, {"model.path": str(folder), **cache}), max_model_len=64)[0]
    return choose_scales(config, load_config(folder))


ALL = {"k0": 0.5, "k1": [0.25, 0.75], "v0": [[2.0]], "v1": [[[3.0]], [[4.0]]], "q0": [1.0], "q1": [1.0]}


def test_which_scales_are_taken(plain: Path, tmp_path: Path) -> None:
    calibrated = with_tensors(plain, tmp_path, **ALL)
    k, v = ((0.5,), (0.25, 0.75)), ((2.0,), (3.0, 4.0))
    assert chosen(plain) is None
    assert chosen(calibrated) is None
    assert chosen(plain, kv_cache_dtype=FP8) == KVScales.uniform(2)
    assert chosen(plain, kv_cache_dtype=FP8, v_scale=0.5) == KVScales.uniform(2, 1.0, 0.5)
    assert chosen(calibrated, kv_cache_dtype=FP8) == KVScales(k, v)
    assert chosen(calibrated, kv_cache_dtype=FP8, k_scale=8.0) == KVScales(((8.0,), (8.0,)), v)
    assert chosen(calibrated, kv_cache_dtype=FP8, k_scale=8.0, v_scale=9.0) == KVScales.uniform(2, 8.0, 9.0)


def test_scales_are_no_weights(plain: Path, tmp_path: Path) -> None:
    folder = with_tensors(plain, tmp_path, **ALL)
    load_parameters(folder, load_config(folder))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k0": 1.0, "v0": 1.0}, "lacks k_scale of layer 1, 2 in all; every layer must have both"),
        (
            ALL | {"k1": [1.0, 1.0, 1.0]},
            r"layers\.1\.self_attn\.k_scale has 3 numbers; it must have 1 for the layer or 2, one a KV",
        ),
    ],
)
def test_scales_that_do_not_fit_the_model(plain: Path, tmp_path: Path, scales: dict[str, Any], message: str) -> None:
    folder = with_tensors(plain, tmp_path, **scales)
    with pytest.raises(InvalidWeights, match=message):
        chosen(folder, kv_cache_dtype=FP8)


def test_latents_carry_scales_of_their_own(tmp_path: Path) -> None:
    folder = save_checkpoint("deepseek_v2", tmp_path)
    model = load_config(folder)
    assert chosen(folder) is None
    assert chosen(folder, kv_cache_dtype=FP8) == KVScales.uniform(model.num_layers)
    assert stores_fp8("auto", replace(model, quantization=Quantization(fp8_kv=True)))
    for name in ("k_scale", "v_scale"):
        message = rf"{name} is 0.5; DeepseekV2ForCausalLM keeps latents, which carry scales of their own: set null"
        with pytest.raises(InvalidArgument, match=message):
            chosen(folder, kv_cache_dtype=FP8, **{name: 0.5})
        settings = {"model.path": str(folder), "cache.kv_cache_dtype": FP8, f"cache.{name}": 0.5}
        with pytest.raises(ConfigError, match=rf"cache\.{message}"):  # and nothing was started
            Cluster(load_cluster_config(None, settings), Mock(spec=[])).start()


def test_stored_scales_of_latents_are_not_taken(tmp_path: Path) -> None:
    """Makers of checkpoints write one number for a whole entry, which has several scales here."""
    plain, folder = save_checkpoint("deepseek_v2", tmp_path / "plain"), tmp_path / "scaled"
    folder.mkdir()
    scales = {f"{which}{layer}": 0.25 for which in "kv" for layer in range(load_config(plain).num_layers)}
    assert chosen(with_tensors(plain, folder, **scales), kv_cache_dtype=FP8) == chosen(plain, kv_cache_dtype=FP8)


def test_one_plane_is_not_stored_in_8_bits(tmp_path: Path) -> None:
    folder = save_checkpoint("deepseek_v4", tmp_path)
    assert chosen(folder) is None
    message = r"kv_cache_dtype is 'fp8_e4m3', .*; DeepseekV4ForCausalLM keeps K and V in one plane"
    with pytest.raises(InvalidArgument, match=message):
        chosen(folder, kv_cache_dtype=FP8)
    settings = {"model.path": str(folder), "cache.kv_cache_dtype": FP8}
    with pytest.raises(ConfigError, match=rf"cache\.{message}"):  # and nothing was started
        Cluster(load_cluster_config(None, settings), Mock(spec=[])).start()
    model = replace(load_config(folder), quantization=Quantization(fp8_kv=True))
    with pytest.raises(InvalidArgument, match="kv_cache_dtype is 'auto', which means 8 bits for this checkpoint"):
        stores_fp8("auto", model)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_states_are_not_stored_in_8_bits(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    assert chosen(folder) is None
    message = r"kv_cache_dtype is 'fp8_e4m3', .* keeps recurrent states, .*: set auto, and give"
    settings = {"model.path": str(folder), "cache.kv_cache_dtype": FP8}
    with pytest.raises(ConfigError, match=rf"cache\.{message}"):  # and nothing was started
        Cluster(load_cluster_config(None, settings), Mock(spec=[])).start()
    model = replace(load_config(folder), quantization=Quantization(fp8_kv=True))
    with pytest.raises(InvalidArgument, match="kv_cache_dtype is 'auto', which means 8 bits for this checkpoint"):
        stores_fp8("auto", model)


def test_another_dtype_is_refused(plain: Path) -> None:
    config = worker_configs(load_cluster_config(None, {"model.path": str(plain)}), max_model_len=64)[0]
    config = replace(config, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(InvalidArgument, match="kv_cache_dtype is 'fp8_e5m2'; it must be one of auto, fp8_e4m3"):
        choose_scales(config, load_config(plain))
