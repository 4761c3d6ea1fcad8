"""Gemma 4 as it is published, with weights for images beside the text decoder's, and what is refused by name."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cache.kernels.paged.kernels import TritonKernels
from tandem.workers import worker
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.models.config import HeadShape
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy_all, random_prompt

WINDOW = 24
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=1, position_embedding_size=16, patch_size=4,
)  # fmt: skip
AUDIO: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=2, num_hidden_layers=1, subsampling_conv_channels=[8, 4], output_proj_dims=32
)
PUBLISHED = ("k_proj.weight", "v_proj.weight", "k_norm.weight")  # of readers, too, where they mean nothing


def save_published(folder: Path) -> Any:
    """Saves the text decoder, in float32. Its readers have K and V, as published ones have."""
    from transformers import Gemma4AudioConfig, Gemma4Config, Gemma4ForConditionalGeneration, Gemma4VisionConfig

    text = make_model("gemma4")
    vision, audio = Gemma4VisionConfig(**VISION), Gemma4AudioConfig(**AUDIO)
    config = Gemma4Config(vision_config=vision, text_config=text.config, audio_config=audio)  # type: ignore[arg-type]
    model = Gemma4ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(folder)
    path, attention = folder / "model.safetensors", "model.language_model.layers.{}.self_attn.{}"
    weights = load_file(path)
    for reader in (3, 4, 5):
        weights |= {attention.format(reader, name): weights[attention.format(0, name)].clone() for name in PUBLISHED}
    save_file(weights, path, {"format": "pt"})
    return text


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Rewrites fields of config.json; None removes a field."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_the_text_decoder_of_a_published_model(tmp_path: Path) -> None:
    oracle = save_published(tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (1, WINDOW - 1, WINDOW + 1, 3 * WINDOW - 2)]
    expected = greedy_all(oracle, prompts, WINDOW + 4)
    with running_island(tmp_path, {"scheduler.max_batch_tokens": 40}) as island:
        assert complete_all(island.address, prompts, max_tokens=WINDOW + 4, **GREEDY) == expected


def test_other_tensors_are_named(tmp_path: Path) -> None:
    save_published(tmp_path)
    config = load_config(tmp_path)
    check_weights(tmp_path, config)
    with pytest.raises(InvalidWeights, match=r"the checkpoint has model.(audio|embed|vision).* which Gemma4ForCon"):
        check_weights(tmp_path, dataclasses.replace(config, skipped_weights=()))


def test_readers_have_no_pages(tmp_path: Path) -> None:
    layout = kv_layout(load_config(save_checkpoint("gemma4", tmp_path)), 16)
    assert [group.layers for group in layout.groups] == [(0, 2), (1,)]
    assert [(group.num_kv_heads, group.head_dim) for group in layout.groups] == [(2, 16), (2, 32)]
    assert layout.readers == ((3, 2), (4, 1), (5, 1))


def test_heads_as_published_configs_name_them(tmp_path: Path) -> None:
    folder = save_checkpoint("gemma4-experts", tmp_path)
    written = load_config(folder)
    rewrite(folder, {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1})
    assert load_config(folder) == written
    rewrite(folder, {"attention_k_eq_v": False})  # which gates the number of heads
    assert load_config(folder).full_heads == HeadShape(2, 32)
    rewrite(folder, {"global_head_dim": None, "rope_parameters": None})
    config = load_config(folder)
    assert config.full_heads == HeadShape(2, 512)
    assert (config.rope.rope_type, config.rope.rotary_dim, config.rope.partial_rotary_factor) == (
        *("proportional", 512),
        0.25,
    )
    assert config.local_rope is not None
    assert (config.local_rope.rope_type, config.local_rope.theta) == ("default", 10_000)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedFeature, "use_bidirectional_attention is 'all'; only"),
        ({"num_kv_shared_layers": 6}, InvalidConfig, "num_kv_shared_layers is 6; it must be a number of last layers"),
        ({"num_kv_shared_layers": 5}, InvalidConfig, "each of a kind that a layer before all of them has"),
        ({"vocab_size_per_layer_input": 190}, InvalidConfig, "vocab_size_per_layer_input is 190; it must be an int"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, UnsupportedFeature, "per_layer_config is of layers 0; the same"),
        (
            {"per_layer_config": {str(layer): {"head_dim": 31} for layer in (1, 4, 5)}},
            UnsupportedFeature,
            "layers that see all have 2 KV heads of 31; a divisor of num_attention_heads, 4, and an even size",
        ),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, InvalidConfig,
         "top_k_experts is 3; it must be at most the number of experts, 2"),
    ],
)  # fmt: skip
def test_what_is_not_served(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    folder = save_checkpoint("gemma4", tmp_path)
    rewrite(folder, changes)
    with pytest.raises(error, match=message):
        load_config(folder)


def test_kernels_of_wide_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes these kernels for heads of 512 in 16 bits. Here they run in Triton's interpreter and float32: prompts
    in chunks, and steps in graph buffers."""
    capture = ModelRunner.capture_steps
    monkeypatch.setattr(ModelRunner, "capture_steps", lambda runner, *limits: capture(runner, *limits, capture=_rerun))
    monkeypatch.setattr(worker, "make_cache", partial(make_cache, kernels=TritonKernels))
    oracle = make_model("gemma4")
    oracle.save_pretrained(tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (3, WINDOW + 2)]
    alone = {"scheduler.roles": "colocated", "island.num_prefill": 0}  # the interpreter is for one thread
    settings = {"scheduler.max_batch_tokens": 20, "scheduler.max_sequences": 2}
    with running_island(tmp_path, alone | settings) as island:
        assert complete_all(island.address, prompts, max_tokens=4, **GREEDY) == greedy_all(oracle, prompts, 4)


def _rerun(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute
