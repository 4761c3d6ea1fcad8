"""Weights that memory keeps quantized: each rank reads its numbers and their scales."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.cache.plan.shard import WHOLE, Shard
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.parameters import AttentionParameters, GatedParameters, LayerParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weights import check_weights, load_parameters
from tandem.workers.weights.fp8 import Fp8
from tests.support.quantized_checkpoints import (
    CHANNEL,
    DEEPSEEK,
    TENSOR,
    Quantize,
    blocks_of,
    by_rows,
    by_tensor,
    quantize_folder,
)

INTERMEDIATE = 176  # of the checkpoint
SCHEMES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "blocks": (DEEPSEEK | {"weight_block_size": [32, 8]}, blocks_of((32, 8))),
    "row": (CHANNEL, by_rows),
    "tensor": (TENSOR, by_tensor),
}


def save(folder: Path, scheme: str, *, fused: bool = False) -> ModelConfig:
    make_checkpoint(folder, "phi3" if fused else "llama")
    quantize_folder(folder, *SCHEMES[scheme])
    return load_config(folder, "float32")


def matrices(layer: LayerParameters) -> list[Tensor]:
    """q, k and v; o; gate and up; down: dequantized."""
    assert isinstance(layer.attention, AttentionParameters)
    assert isinstance(layer.feed_forward, GatedParameters)
    weights = layer.attention.qkv, layer.attention.o, layer.feed_forward.gate_up, layer.feed_forward.down
    assert {type(weight) for weight in weights} == {Fp8}
    return [weight.tensor() for weight in weights]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_ranks_hold_the_parts_of_the_whole(scheme: str, fused: bool, tmp_path: Path) -> None:
    config = save(tmp_path, scheme, fused=fused)
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


@pytest.mark.parametrize(("columns", "fit"), [(16, "1, 11"), (128, "1"), (88, "1, 2")])
def test_ranks_that_cannot_divide_the_groups_are_refused_with_those_that_can(
    columns: int, fit: str, tmp_path: Path
) -> None:
    """88 columns each, so that both ranks would have a part of a group of 16, and the second one all of the cut one of
    128."""
    make_checkpoint(tmp_path, "llama")
    quantize_folder(tmp_path, DEEPSEEK | {"weight_block_size": [32, columns]}, blocks_of((32, columns)))
    config = load_config(tmp_path, "float32")
    assert config.intermediate_size == INTERMEDIATE
    load_parameters(tmp_path, config)
    if "2" in fit:
        load_parameters(tmp_path, shard_config(config, Shard(0, 2)))
        return
    refused = rf"down_proj.weight has scales of {columns} columns each, .* 88 of 176; {fit} ranks can"
    for load in (load_parameters, check_weights):
        with pytest.raises(InvalidWeights, match=refused):
            load(tmp_path, shard_config(config, Shard(1, 2)))
