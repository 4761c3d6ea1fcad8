"""Tokens through the gRPC server with KV stored in 8 bits, against transformers with a cache that rounds alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.transfer.errors import MembershipRefused
from tandem.workers.worker import Worker
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all
from tests.support.draft_heads import save_mtp
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK, OUTPUT = 48, 12
LENGTHS = (1, 9, CHUNK + 1, 2 * CHUNK + 5)
PLAIN: dict[str, Any] = {"kv_cache_dtype": "auto", "k_scale": None}
RANKS: dict[str, Any] = {"island.prefill_ranks": 2, "island.decode_ranks": 2}
NAMES = ("self_attn.{}_scale", "self_attn.attn.{}_scale", "self_attn.{0}_proj.{0}_scale")


def random_scales(num_layers: int, numbers: int, seed: int = 0) -> KVScales:
    """Draws scales. numbers: 1 a layer, or one for each KV head. Some are so small that K and V are cut off."""
    drawn = torch.rand(2, num_layers, numbers, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.004
    k, v = (tuple(tuple(layer) for layer in which) for which in drawn.tolist())
    return KVScales(k, v)


def add_scales(folder: Path, scales: KVScales, name: str) -> None:
    """Writes scales into a checkpoint as its makers do; name: of a tensor within a layer."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for which, of_layers in (("k", scales.k), ("v", scales.v)):
        for layer, numbers in enumerate(of_layers):
            tensors[f"model.layers.{layer}.{name.format(which)}"] = torch.tensor(numbers)
    save_file(tensors, path, metadata={"format": "pt"})


def check_tokens(folder: Path, model: "PreTrainedModel", scales: KVScales, settings: dict[str, Any]) -> None:
    from tests.support.rounding_cache import RoundingCache

    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [greedy(model, prompt, OUTPUT, RoundingCache(model, scales)) for prompt in prompts]
    assert expected != [greedy(model, prompt, OUTPUT) for prompt in prompts], "rounding decides nothing here"
    with running_island(folder, {"scheduler.max_batch_tokens": CHUNK, **settings}) as island:
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected
        # Once more, with prefixes that are there already: they go page to page.
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected
        assert all(pool.dtype == FP8 for worker in island.workers for pool in worker.pools)
        with island.client() as client:
            model_info = client.model_info()
        timings = complete(island.address, random_prompt(5, 99), max_tokens=2, **GREEDY)[-1].timings
        assert timings is not None
        assert model_info.kv_bytes_per_token == timings.bytes_pushed // 5


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_layers_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    model, scales = load_oracle(folder), random_scales(2, 1)
    add_scales(folder, scales, name)
    check_tokens(folder, model, scales, {"cache.kv_cache_dtype": "fp8_e4m3"})


def test_a_layer_of_the_checkpoint_drafts(tmp_path: Path) -> None:
    """It has no scales in the checkpoint, and needs none: its K and V decide drafts alone."""
    folder = save_mtp(tmp_path / "model", "glm4_moe")
    model, scales = load_oracle(folder), random_scales(2, 1)
    add_scales(folder, scales, NAMES[0])
    check_tokens(folder, model, scales, {"cache.kv_cache_dtype": "fp8_e4m3", "speculation.method": "mtp"})


@pytest.mark.gate("2+2")
@pytest.mark.parametrize("settings", [{}, RANKS], ids=["1+1", "2+2"])
def test_scales_of_heads_in_a_checkpoint_that_asks_for_fp8(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    model, scales = load_oracle(folder), random_scales(2, 2)
    add_scales(folder, scales, NAMES[0])
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    check_tokens(folder, model, scales, settings)


@pytest.mark.gate("gpt_oss")
@pytest.mark.parametrize("case", ["gemma3", "gpt_oss"])
def test_windows_softcaps_and_sinks_with_scales_that_are_given(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    model = load_oracle(folder)
    scales = KVScales.uniform(model.config.num_hidden_layers, 0.015, 0.02)
    check_tokens(
        folder, model, scales, {"cache.kv_cache_dtype": "fp8_e4m3", "cache.k_scale": 0.015, "cache.v_scale": 0.02}
    )


def test_workers_with_other_scales_form_no_island(tmp_path: Path) -> None:
    folder = save_checkpoint("llama", tmp_path)
    config = load_config(None, {"model.path": str(folder), "cache.kv_cache_dtype": "fp8_e4m3", "cache.k_scale": 0.5})
    first, second = worker_configs(config, max_model_len=64)
    for other, field in ((replace(second, k_scale=0.25), "kv_scales"), (replace(second, **PLAIN), "kv_cache_dtype")):
        workers = [Worker(first), Worker(other)]
        handles = [worker.open(8) for worker in workers]
        for worker in workers:
            with pytest.raises(MembershipRefused, match=field):
                worker.join(handles)
            worker.stop()
