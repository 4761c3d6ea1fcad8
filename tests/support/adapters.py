"""Random LoRA adapters in PEFT's format, and what transformers generates with them: merged into its weights."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tandem.workers.adapters.adapters import Adapters
from tandem.workers.models.config import ModelConfig
from tandem.workers.weights.adapted import AdaptedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = 0.4  # of random numbers: with it an adapter of any family changes tokens


def modules_of(model: "PreTrainedModel", targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """By name, those that PEFT would change."""
    ends = tuple(f".{one}" for one in targets)
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(ends) and isinstance(module, torch.nn.Linear)
    }


def save_adapter(
    model: "PreTrainedModel", folder: Path, targets: Sequence[str], *, rank: int = 4, seed: int = 0, **config: Any
) -> Path:
    """A PEFT folder with a random adapter of the modules `targets`. config: other fields of adapter_config.json."""
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
def merged(model: "PreTrainedModel", folder: Path | None) -> Iterator["PreTrainedModel"]:
    """The model with the adapter in its weights, as PEFT merges it; None: as it is."""
    if folder is None:
        yield model
        return
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is on its way out
        adapted: Any = PeftModel.from_pretrained(model, folder)
    try:
        yield adapted
    finally:
        adapted.unload()


def with_tensors(folder: Path, change: Mapping[str, torch.Tensor | None]) -> None:
    """Replaces, adds or removes tensors of a PEFT folder."""
    from safetensors.torch import load_file

    path = folder / "adapter_model.safetensors"
    tensors = {name: one for name, one in {**load_file(path), **change}.items() if one is not None}
    save_file(tensors, path)


def save_for(weights: AdaptedWeights, folder: Path, *, rank: int, seed: int = 0) -> Path:
    """A random adapter of everything that adapters can change of a model with one rank."""
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
    config: ModelConfig, weights: AdaptedWeights, folder: Path, count: int, *, rank: int
) -> tuple[Adapters, list[bytes]]:
    """The adapters of a worker that holds `count` random ones, and their digests."""
    adapters, digests = Adapters(config, weights, (count + 1) * weights.slot_bytes), list[bytes]()
    for number in range(count):
        path = save_for(weights, folder / str(number), rank=rank, seed=number)
        adapters.read(number, str(number), str(path))
        digests.append(adapters.reading(number).result().digest)
        adapters.load(number, digests[-1])
    return adapters, digests
