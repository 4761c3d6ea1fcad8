"""Random LoRA adapters in PEFT's format, and what transformers generates with them: merged into its weights."""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tandem.workers.adapters.adapters import Adapters
from tandem.workers.models.config import ModelConfig
from tandem.workers.weights.adapted import AdaptedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = 0.4  # of random numbers: with it an adapter of any family changes tokens


def modules_of(model: "PreTrainedModel", targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Returns the modules that PEFT would change, by name."""
    ends = tuple(f".{one}" for one in targets)
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(ends) and isinstance(module, torch.nn.Linear)
    }


def save_adapter(
    model: "PreTrainedModel", folder: Path, targets: Sequence[str], *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """Saves a PEFT folder with a random adapter of the modules `targets`. config: other fields of
    adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    generator = torch.Generator().manual_seed(seed)
    ranks, tensors = config.get("rank_pattern", {}), {}
    for name, module in modules_of(model, targets).items():
        own = next((value for end, value in ranks.items() if name.endswith(end)), rank)
        shapes = {"A": (own, module.in_features), "B": (module.out_features, own)}
        for which, shape in shapes.items():
            numbers = torch.randn(shape, generator=generator) * SIZE / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = numbers
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def by_peft(model: "PreTrainedModel", folder: Path | None) -> Iterator["PreTrainedModel"]:
    """Yields the model with the adapter; None: without one."""
    if folder is None:
        yield model
        return
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that is on its way out
        adapted: Any = PeftModel.from_pretrained(model, folder)
    try:
        yield adapted
    finally:
        adapted.unload()


@contextmanager
def merged(model: "PreTrainedModel", folder: Path | None) -> Iterator["PreTrainedModel"]:
    """Yields the model with the adapter added to the weights, because PEFT takes gate_proj and up_proj of a family with
    experts for routed ones, wherever they are. For adapters of one rank and scale."""
    before = {name: one.clone() for name, one in model.state_dict().items()} if folder is not None else {}
    if folder is not None:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors, modules = load_file(folder / "adapter_model.safetensors"), dict(model.named_modules())
        for name, a in tensors.items():
            module, _, which = name.removeprefix("base_model.model.").partition(".lora_")
            if which == "A.weight":
                b = tensors[name.replace("lora_A", "lora_B")]
                weight: Any = modules[module].weight
                weight.data += config["lora_alpha"] / config["r"] * (b @ a)
    try:
        yield model
    finally:
        if before:
            model.load_state_dict(before)


def save_for(weights: AdaptedWeights, folder: Path, *, rank: int, seed: int = 0) -> Path:
    """Saves a random adapter of everything that adapters can change in a model with one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name in weights.parts})
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, part in weights.parts.items():
        for which, shape in {"A": (rank, part.columns), "B": (part.rows, rank)}.items():
            numbers = torch.randn(shape, generator=generator) * SIZE / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = numbers.to(weights.memory.dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def held_adapters(
    config: ModelConfig, weights: AdaptedWeights, folders: Sequence[Path]
) -> tuple[Adapters, list[bytes]]:
    """Returns the adapters of a worker that holds the adapters in the folders, and their digests."""
    adapters, digests = Adapters(config, weights, (len(folders) + 1) * weights.slot_bytes), list[bytes]()
    for number, path in enumerate(folders):
        adapters.read(number, path.name, str(path))
        digests.append(adapters.reading(number).result().digest)
        adapters.load(number, digests[-1])
    return adapters, digests


def random_adapters(weights: AdaptedWeights, folder: Path, count: int) -> list[Path]:
    """Makes folders with adapters of all products of a model, the same each time."""
    return [save_for(weights, folder / str(number), rank=weights.rank, seed=number) for number in range(count)]
