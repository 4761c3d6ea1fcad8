"""Weights that memory keeps quantized: each rank reads its numbers and their scales."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import GatedParameters, LayerParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weights import load_parameters
from tandem.workers.weights.allocator import Allocator
from tandem.workers.weights.formats.format import Format, Quantization
from tandem.workers.weights.formats.registry import FORMATS
from tandem.workers.weights.weight import Weight

PER_ROW = 1 << 20  # columns of a group, so that a row has one
INTERMEDIATE = 176  # of the checkpoint


@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(Weight):
    """Integers, and a scale for each `group` columns of a row."""

    numbers: Tensor  # int32 [rows, columns]
    scales: Tensor  # float32 [rows, groups]
    group: int

    @property
    def rows(self) -> int:
        return self.numbers.shape[0]

    @property
    def columns(self) -> int:
        return self.numbers.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def tensors(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers, "scales": self.scales}

    def slice(self, begin: int, end: int) -> "Scaled":
        return Scaled(self.numbers[begin:end], self.scales[begin:end], self.group)

    def tensor(self) -> Tensor:
        return self.numbers * self.scales[:, torch.arange(self.columns) // self.group]

    def linear(self, x: Tensor) -> Tensor:
        return x @ self.tensor().T


def use_groups(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class ScaledAllocator(Allocator):
        def linear(self, rows: int, columns: int, *, biased: bool = False) -> Scaled:
            numbers = torch.empty(rows, columns, dtype=torch.int32, device=self.device)
            return Scaled(numbers, self(rows, -(-columns // group)), group)

    monkeypatch.setitem(FORMATS, "fp8", (Format(lambda plain, quantization: ({}, set()), ScaledAllocator),))


def save(folder: Path, group: int, *, fused: bool = False) -> ModelConfig:
    """A checkpoint whose products are integers with scales."""
    make_checkpoint(folder, "phi3" if fused else "llama")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors.pop(name).shape
        generator = torch.Generator().manual_seed(len(tensors))
        tensors[name.replace("weight", "numbers")] = torch.randint(-9, 9, (rows, columns), generator=generator).int()
        tensors[name.replace("weight", "scales")] = torch.rand(rows, -(-columns // group), generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return dataclasses.replace(load_config(folder, "float32"), quantization=Quantization("fp8"))


def matrices(layer: LayerParameters) -> list[Tensor]:
    """q, k and v; o; gate and up; down: dequantized."""
    assert isinstance(layer.feed_forward, GatedParameters)
    weights = layer.attention.qkv, layer.attention.o, layer.feed_forward.gate_up, layer.feed_forward.down  # type: ignore[union-attr]
    return [weight.tensor() for weight in weights]


@pytest.mark.parametrize("group", [8, 1, PER_ROW], ids=["groups of 8", "groups of 1", "a row"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_ranks_hold_the_parts_of_the_whole(
    group: int, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_groups(group, monkeypatch)
    config = save(tmp_path, group, fused=fused)
    whole, *halves = [
        [matrices(layer) for layer in load_parameters(tmp_path, shard_config(config, shard)).layers]
        for shard in (WHOLE, Shard(0, 2), Shard(1, 2))
    ]
    heads = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    for rank, layers in enumerate(halves):
        for (qkv, o, gate_up, down), held in zip(whole, layers, strict=True):
            expected = (
                torch.cat([part.chunk(2)[rank] for part in qkv.split(heads)]),
                o.chunk(2, 1)[rank],
                torch.cat([part.chunk(2)[rank] for part in gate_up.chunk(2)]),
                down.chunk(2, 1)[rank],
            )
            for mine, part in zip(held, expected, strict=True):
                assert torch.equal(mine, part)


def test_ranks_that_cannot_divide_the_groups_are_refused_with_those_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """88 columns each, so that both ranks would have a part of a group of 16."""
    use_groups(16, monkeypatch)
    config = save(tmp_path, 16)
    assert config.intermediate_size == INTERMEDIATE
    load_parameters(tmp_path, config)
    with pytest.raises(InvalidWeights, match=r"down_proj.scales has .* 11 groups .* 2 ranks cannot divide; 1, 11 can"):
        load_parameters(tmp_path, shard_config(config, Shard(0, 2)))
