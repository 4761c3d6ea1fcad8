"""PEFT folders: what is read of them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.adapters.peft_config import PeftConfig
from tandem.workers.adapters.peft_folder import AdapterReader
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.config import AdapterSettings
from tandem.workers.errors import BadAdapter
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tests.support.adapters import save_for
from tests.support.checkpoints import save_checkpoint
from tests.support.encoder_models import save_t5gemma

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> AdapterReader:
    folder = save_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    config = load_config(folder, "float32")
    decoder = load_decoder(folder, config, adapters=AdapterSettings(1, 8))
    assert decoder.adapted is not None
    return AdapterReader(config, decoder.adapted)


@pytest.fixture
def folder(reader: AdapterReader, tmp_path: Path) -> Path:
    return save_for(reader.weights, tmp_path / "adapter", rank=4)


def read(reader: AdapterReader, folder: Path) -> tuple[bytes, torch.Tensor]:
    numbers = torch.full((reader.weights.memory.shape[1],), torch.nan)
    return reader.read(folder, numbers).digest, numbers


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "adapter_model.safetensors"
    held = {**load_file(path), **tensors}
    save_file({name: one for name, one in held.items() if one is not None}, path)


def test_a_slot_has_the_adapter_and_its_scale(reader: AdapterReader, folder: Path) -> None:
    """q_proj has a rank and an alpha of its own; down_proj of layer 1 is not changed."""
    configure(
        folder,
        lora_alpha=6,
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 5},
        exclude_modules=["model.layers.1.mlp.down_proj"],
    )
    a, b = torch.randn(2, 64), torch.randn(64, 2)
    for layer in (0, 1):
        name = Q.replace("layers.0", f"layers.{layer}")
        change(folder, **{f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    down = "base_model.model.model.layers.1.mlp.down_proj"
    change(folder, **{f"{down}.lora_{which}.weight": None for which in "AB"})
    _, numbers = read(reader, folder)
    assert numbers.isfinite().all()
    parts = reader.weights.parts
    for layer, scale in ((0, 5 / 2), (1, 6 / 2)):
        own_a, own_b = reader.weights.views(parts[f"model.layers.{layer}.self_attn.q_proj"], numbers)
        assert torch.equal(own_a[:2], a)
        assert torch.equal(own_b[:, :2], b * scale)
        assert not own_a[2:].any()
        assert not own_b[:, 2:].any()
    assert not any(one.any() for one in reader.weights.views(parts["model.layers.1.mlp.down_proj"], numbers))


def test_rslora_divides_by_the_root(tmp_path: Path) -> None:
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert PeftConfig.read(tmp_path).scale_of("model.layers.0.self_attn.q_proj") == 2.0


def test_a_digest_is_of_weights_and_configuration(reader: AdapterReader, folder: Path) -> None:
    first, _ = read(reader, folder)
    assert read(reader, folder)[0] == first
    configure(folder, lora_alpha=5)
    other, _ = read(reader, folder)
    held = load_file(folder / "adapter_model.safetensors")[f"{Q}.lora_B.weight"]
    held[3, 1] += 1
    change(folder, **{f"{Q}.lora_B.weight": held})
    assert len({first, other, read(reader, folder)[0]}) == 3


Change = Callable[[Path], object]
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be LORA"),
    "dora": ({"use_dora": True}, "use_dora is True; .* DoRA are not served"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only'; .* biases are not served"),
    "bias of B": ({"lora_bias": True}, "lora_bias is True"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save is .* whole modules"),
    "parameters": ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is"),
    "activated": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is .* leaves the base as it is"),
    "no rank": ({"r": ...}, "r is missing"),
    "rank 0": ({"r": 0}, "r is 0; it must be an integer of at least 1"),
    "large rank": ({"r": 9}, "r of module .* is 9; it must be at most 8"),
    "no targets": ({"target_modules": None}, "target_modules is None"),
    "bad pattern": ({"rank_pattern": {"(": 2}}, "rank_pattern has '\\(', which is no pattern"),
    "bad targets": ({"target_modules": [3]}, "target_modules is"),
    "other targets": ({"target_modules": ["k_proj"]}, "target_modules has no such module"),
    "infinite": ({"lora_alpha": 1e30}, "lora_alpha is 1e\\+30; it must be at most"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_not_served_are_refused(case: str, reader: AdapterReader, folder: Path) -> None:
    fields, reason = CONFIGS[case]
    configure(folder, **fields)
    with pytest.raises(BadAdapter, match=reason):
        read(reader, folder)


TENSORS: dict[str, tuple[Change, str]] = {
    "no B": (lambda folder: change(folder, **{f"{Q}.lora_B.weight": None}), "lacks lora_B of module .*q_proj"),
    "a module missing": (
        lambda folder: change(folder, **{f"{Q}.lora_{which}.weight": None for which in "AB"}),
        "lacks lora_A and lora_B of model.layers.0.self_attn.q_proj",
    ),
    "shape": (
        lambda folder: change(folder, **{f"{Q}.lora_B.weight": torch.zeros(63, 4)}),
        r"q_proj.lora_B.weight has shape \[63, 4\]; it must be \[64, 4\]",
    ),
    "rank of A": (
        lambda folder: change(folder, **{f"{Q}.lora_A.weight": torch.zeros(3, 64)}),
        r"has shape \[3, 64\]; it must be \[4, 64\]",
    ),
    "integers": (
        lambda folder: change(folder, **{f"{Q}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int64)}),
        "has torch.int64; it must be floating point",
    ),
    "magnitude": (
        lambda folder: change(folder, **{f"{Q}.lora_magnitude_vector": torch.zeros(64)}),
        "lora_magnitude_vector; each must be .*lora_B.weight",
    ),
    "embedding": (
        lambda folder: change(
            folder,
            **{f"{EMBEDDING}.lora_A.weight": torch.zeros(4, 199), f"{EMBEDDING}.lora_B.weight": torch.zeros(64, 4)},
        ),
        "an embedding or head; adapters of these are not served",
    ),
    "unknown": (
        lambda folder: change(folder, **{f"{Q}x.lora_{which}.weight": torch.zeros(4, 4) for which in "AB"}),
        "which no adapter can change; it must be one of down_proj, gate_proj, k_proj",
    ),
    "experts": (
        lambda folder: change(folder, **{f"{Q}.experts.0.up.lora_{which}.weight": torch.zeros(4, 4) for which in "AB"}),
        "of routed experts",
    ),
    "pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "adapter_model.bin, a pickle, which is never read",
    ),
    "cut short": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 20),
        "cut short or no safetensors file",
    ),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "are not there"),
    "no configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json is not there"),
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not readable JSON"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_weights_that_do_not_fit_are_refused(case: str, reader: AdapterReader, folder: Path) -> None:
    spoil, reason = TENSORS[case]
    spoil(folder)
    with pytest.raises(BadAdapter, match=reason):
        read(reader, folder)


@pytest.mark.parametrize("save", [lambda folder: save_checkpoint("deepseek_v4", folder), save_t5gemma])
def test_models_that_no_adapter_can_change_are_refused(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(UnsupportedFeature, match=r"adapters.max_resident is 1; for \w+ it must be 0"):
        load_decoder(tmp_path, load_config(tmp_path, "float32"), adapters=AdapterSettings(1, 8))
