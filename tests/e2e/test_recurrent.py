"""Models with recurrent layers through the gRPC server: cuts of prompts, models for images, n, moves, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.cluster.errors import InvalidRequest
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.drafter_config import load_drafter_config
from tandem.workers.models.drafters.load import check_drafter_weights
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights
from tandem.workers.runner.model_cache import kv_layout
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all
from tests.support.draft_heads import save_mtp
from tests.support.http_client import COMPLETIONS, answer
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.tvm_cache import TvmCache
from tests.support.waiting import until

CHUNK = 64  # tokens that the rules take at a time
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)
OUTPUT = 9
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=32, num_heads=2, depth=1, patch_size=4, out_hidden_size=64,
    num_position_embeddings=16,
)  # fmt: skip
MTP = SpeculationSettings("mtp")
SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Rewrites fields of config.json; None removes a field."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def is_idle(island: Island) -> bool:
    """Returns whether no sequence is left, and no page of K and V or of states is in use."""
    caches = [TvmCache.of(worker.cache) for worker in island.workers]
    return all(one.is_empty and one.room(1).free == one.room(1).total for one in caches)


@pytest.mark.gate("qwen3_next-64")
@pytest.mark.parametrize("chunk", [1, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("case", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_prompts_are_cut_anywhere(case: str, chunk: int, tmp_path: Path) -> None:
    """All come at once, with cancelled requests, so that chunks of some share forwards with others' rows."""
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(length, length) for length in LENGTHS]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    with running_island(folder, {"scheduler.max_batch_tokens": chunk}) as island, island.client() as client:
        for prompt in prompts[2:]:
            cancelled = client.generate(prompt, max_tokens=20, **GREEDY)
            next(cancelled)
            cancelled.close()
        assert complete_all(island.address, prompts * 2, max_tokens=OUTPUT, **GREEDY) == expected * 2
        until(lambda: is_idle(island))


def save_with_images(case: str, folder: Path) -> Any:
    """Saves the text decoder, in float32."""
    import transformers

    text: Any = make_model(case)
    name = "Qwen3_5Moe" if case.endswith("moe") else "Qwen3_5"
    config_class, model_class = (getattr(transformers, f"{name}{of}") for of in ("Config", "ForConditionalGeneration"))
    vision = getattr(transformers, f"{name}VisionConfig")(**VISION)
    text.config.rope_parameters |= SECTIONS
    model = model_class(config_class(vision_config=vision.to_dict(), text_config=text.config.to_dict()))
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    return text


@pytest.mark.gate("qwen3_5")
@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_decoder_of_a_model_for_images(case: str, tmp_path: Path) -> None:
    """The model's layer for multi-token prediction drafts."""
    oracle, path = save_with_images(case, tmp_path), tmp_path / "model.safetensors"
    stored = load_file(save_mtp(tmp_path / "text", case) / path.name)
    save_file(load_file(path) | {name: one for name, one in stored.items() if name.startswith("mtp.")}, path)
    prompts = [random_prompt(length, length) for length in (1, CHUNK + 1, 2 * CHUNK - 2)]
    expected = greedy_all(oracle, prompts, OUTPUT)
    for method in ("none", "mtp"):
        with running_island(tmp_path, {"speculation.method": method}) as island, island.client() as client:
            assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected
            (info,) = client.cluster_info().islands
            assert (info.workers[1].counters.drafted_tokens > 0) == (method == "mtp")


def test_other_tensors_are_named(tmp_path: Path) -> None:
    save_with_images("qwen3_5", tmp_path)
    config = load_config(tmp_path)
    check_weights(tmp_path, config)
    with pytest.raises(InvalidWeights, match=r"the checkpoint has model.visual.* which Qwen3_5ForConditionalGen"):
        check_weights(tmp_path, dataclasses.replace(config, skipped_weights=()))
    rewrite(tmp_path, {"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
    with pytest.raises(InvalidConfig, match="num_experts is missing"):
        load_config(tmp_path)


@pytest.mark.gate("qwen3_5")
@pytest.mark.parametrize("case", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_each_choice_has_a_state_of_its_own(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    prompt = random_prompt(CHUNK + 5, 1)
    expected = greedy(load_oracle(folder), prompt, OUTPUT)
    asked: dict[str, Any] = {"prompt": prompt, "n": 2, "max_tokens": OUTPUT, "return_token_ids": True}
    with running_island(folder, {"gateway.http_port": 0}) as island:
        found = answer(island.http, COMPLETIONS, **asked, **GREEDY)["choices"]
        assert [choice["token_ids"] for choice in found] == [expected] * 2
        drawn = answer(island.http, COMPLETIONS, **asked, temperature=0.9, seed=4, ignore_eos=True)["choices"]
        alone = answer(island.http, COMPLETIONS, **asked | {"n": 1}, temperature=0.9, seed=5, ignore_eos=True)
        assert drawn[1]["token_ids"] == alone["choices"][0]["token_ids"] != drawn[0]["token_ids"]
        usage = complete(island.address, prompt, max_tokens=1, **GREEDY)[-1].usage
        assert usage is not None
        assert usage.cached_tokens == 64  # of 69: a snapshot stands at the last full page
        with pytest.raises(InvalidRequest, match=r"sliding is set; the model keeps (recurrent states|latents), so"):
            complete(island.address, prompt, sliding={"window": 32, "sinks": 4})
        until(lambda: is_idle(island))


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_requests_that_move_are_computed_again(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some prompts are computed by their decode worker beside its rows."""
    move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(5 + 9 * number, seed=number) for number in range(6)]
    expected = greedy_all(load_oracle(folder), prompts, 40)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02, "scheduler.max_batch_tokens": 48}
    with running_island(folder, settings) as island:
        assert complete_all(island.address, prompts, max_tokens=40, **GREEDY) == expected
        until(lambda: is_idle(island))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedFeature, "hidden_act is 'gelu'; only 'silu' is served"),
        ({"attn_output_gate": False}, UnsupportedFeature, "attn_output_gate is False; only True is served"),
        ({"layer_types": ["linear_attention"] * 3}, InvalidConfig, "it must be a list of 4, num_hidden_layers"),
        ({"layer_types": ["mamba"] * 4}, UnsupportedFeature, "layer_types has 'mamba'; only linear_attention, full"),
        ({"layer_types": ["linear_attention"] * 4}, UnsupportedFeature, "all 4 layers keep recurrent states; at least"),
        (
            {"linear_num_value_heads": 5},
            InvalidConfig,
            "linear_num_value_heads is 5; it must be a multiple of linear_n",
        ),
        ({"linear_conv_kernel_dim": 1}, InvalidConfig, "linear_conv_kernel_dim is 1; it must be an integer of at leas"),
    ],
)
def test_what_is_not_served(tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    folder = save_checkpoint("qwen3_next", tmp_path)
    rewrite(folder, changes)
    with pytest.raises(error, match=message):
        load_config(folder)


def test_layers_by_an_interval(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3_next", tmp_path)
    written = load_config(folder)
    rewrite(folder, {"layer_types": None})
    assert load_config(folder) == written
    rewrite(folder, {"full_attention_interval": 2})
    layout = kv_layout(load_config(folder), 16)
    assert [group.layers for group in layout.groups] == [(1, 3), (0, 2)]


@pytest.mark.parametrize(
    ("case", "method", "message"),
    [
        ("nemotron_h", "eagle3", "'eagle3'; layers of NemotronHForCausalLM are one block each, and a head takes what"),
        ("nemotron_h", "mtp", "NemotronHForCausalLM has 0 layers for multi-token prediction: give a checkpoint with 1"),
        ("kimi_linear", "mtp", "KimiLinearForCausalLM has 0 layers for multi-token prediction: give a checkpoint with"),
    ],
)
def test_no_such_head_drafts_for_it(case: str, method: Any, message: str, tmp_path: Path) -> None:
    config = load_config(save_checkpoint(case, tmp_path))
    with pytest.raises(UnsupportedFeature, match=message):
        load_drafter_config(SpeculationSettings(method=method, draft=str(tmp_path)), config)


@pytest.mark.parametrize(
    ("case", "field"), [("qwen3_next", "num_nextn_predict_layers"), ("qwen3_5", "mtp_num_hidden_layers")]
)
def test_one_layer_for_multi_token_prediction_drafts(case: str, field: str, tmp_path: Path) -> None:
    """The layer has experts as the first layer has, and weights of its own."""
    rewrite(save_checkpoint(case, tmp_path), {field: 2, "decoder_sparse_step": 2})
    with pytest.raises(UnsupportedFeature, match="has 2 layers for multi-token prediction: give a checkpoint with 1"):
        load_drafter_config(MTP, load_config(tmp_path))
    rewrite(tmp_path, {field: None})
    config = load_config(tmp_path)
    drafter = load_drafter_config(MTP, config)
    assert drafter is not None
    assert (drafter.num_layers, drafter.moe is not None and 0 in drafter.moe.layers) == (1, False)
    with pytest.raises(UnsupportedFeature, match=r"has no weights mtp\.\*, which belong to a layer for multi-token"):
        check_drafter_weights(tmp_path, MTP, config, drafter)


def test_a_layer_with_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    path, config = save_mtp(tmp_path, "qwen3_5") / "model.safetensors", load_config(tmp_path)
    drafter = load_drafter_config(MTP, config)
    assert drafter is not None
    check_drafter_weights(tmp_path, MTP, config, drafter)
    tensors = load_file(path)
    save_file(tensors | {"mtp.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    check_weights(tmp_path, config)
    with pytest.raises(InvalidWeights, match=r"has mtp\.embed_tokens\.weight, which Qwen3_5ForCausalLM does not use"):
        check_drafter_weights(tmp_path, MTP, config, drafter)


def test_it_drafts_for_nothing(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3_next", tmp_path / "drafter")
    target = load_config(save_checkpoint("llama", tmp_path / "target"))
    with pytest.raises(UnsupportedFeature, match="is Qwen3NextForCausalLM, which does not serve as a drafter"):
        load_drafter_config(SpeculationSettings(method="draft_model", draft=str(folder)), target)


def test_states_have_no_scales(tmp_path: Path) -> None:
    config = load_config(save_checkpoint("qwen3_next", tmp_path))
    with pytest.raises(InvalidArgument, match="scales are given, but the layout has groups with states; only K and V"):
        kv_layout(config, 16, KVScales.uniform(4))
