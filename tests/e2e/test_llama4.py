"""Llama 4 with images' weights beside the text decoder's, and what of its config is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cache.plan.errors import InvalidArgument
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights
from tandem.workers.runner.model_cache import kv_layout
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy_all, random_prompt

CHUNK = 32
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, image_size=28, patch_size=14,
    vision_output_dim=32, projector_input_dim=32, projector_output_dim=32,
)  # fmt: skip


def save_with_images(folder: Path) -> Any:
    """Saves the text decoder, in float32."""
    from transformers import Llama4Config, Llama4ForConditionalGeneration, Llama4VisionConfig

    text = make_model("llama4")
    config = Llama4Config(vision_config=Llama4VisionConfig(**VISION), text_config=text.config)
    model = Llama4ForConditionalGeneration(config)
    model.language_model.load_state_dict(text.state_dict())
    model.save_pretrained(folder)
    return text


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Rewrites fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_text_decoder_of_a_model_for_images(tmp_path: Path) -> None:
    oracle = save_with_images(tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 2)]
    expected = greedy_all(oracle, prompts, CHUNK + 4)
    with running_island(tmp_path, {"scheduler.max_batch_tokens": 40}) as island:
        assert complete_all(island.address, prompts, max_tokens=CHUNK + 4, **GREEDY) == expected


def test_other_tensors_are_named(tmp_path: Path) -> None:
    save_with_images(tmp_path)
    config = load_config(tmp_path)
    check_weights(tmp_path, config)
    with pytest.raises(InvalidWeights, match=r"the checkpoint has multi_modal_projector.* which Llama4ForConditionalG"):
        check_weights(tmp_path, dataclasses.replace(config, skipped_weights=()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_chunk_size": None}, InvalidConfig, "attention_chunk_size is None; it must be an integer of at"),
        ({"no_rope_layers": [1, 0]}, InvalidConfig, r"no_rope_layers is \[1, 0\]; it must be 4 times 0 or 1"),
        ({"no_rope_layers": [1, 0, 2, 1]}, InvalidConfig, "it must be 4 times 0 or 1"),
        ({"layer_types": ["full_attention"] * 4}, UnsupportedFeature, "layer_types and no_rope_layers disagree"),
        ({"attn_temperature_tuning": "on"}, InvalidConfig, "attn_temperature_tuning is 'on'; it must be true or false"),
        ({"interleave_moe_layer_step": 0}, InvalidConfig, "interleave_moe_layer_step is 0; it must be an integer of"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            UnsupportedFeature,
            "rope_type is 'yarn'; Llama 4 is served with default, linear, llama3",
        ),
    ],
)
def test_what_is_not_served(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    folder = save_checkpoint("llama4", tmp_path)
    rewrite(folder, changes)
    with pytest.raises(error, match=message):
        load_config(folder)


def test_pages_divide_chunks(tmp_path: Path) -> None:
    config = load_config(save_checkpoint("llama4", tmp_path))
    assert [type(group.keeps).__name__ for group in kv_layout(config, 16).groups] == ["Chunk", "All"]
    with pytest.raises(InvalidArgument, match=r"page_size is 24; Llama4ForCausalLM attends in chunks of 32 positions"):
        kv_layout(config, 24)


def test_fields_as_the_first_releases_have_them(tmp_path: Path) -> None:
    """They have no layers by name, a number for a boolean, and llama3's factors equal, so that nothing is
    interpolated."""
    folder = save_checkpoint("llama4", tmp_path)
    scaling = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    changes: dict[str, Any] = {"no_rope_layers": [], "attn_temperature_tuning": 4, "layer_types": None}
    rewrite(folder, changes | {"rope_scaling": {**scaling, "original_max_position_embeddings": 8192}})
    config = load_config(folder)
    assert config.chunked is not None
    assert config.chunked.layers == {0, 1, 2}
    assert config.chunked.temperature is not None
    assert config.local_rope is not None
    assert config.local_rope.rope_type == "llama3"
    rewrite(folder, {"attn_temperature_tuning": False})
    chunked = load_config(folder).chunked
    assert chunked is not None
    assert chunked.temperature is None
