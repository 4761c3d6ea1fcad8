"""Shards of size 2: the real loader against slices of the whole model's weights; layouts and maps that must differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.transfer.errors import InvalidPositionMap
from tandem.transfer.wire_map import decode_map, encode_map
from tandem.workers.checkpoint import safetensors_file
from tandem.workers.models.parameters import GatedParameters, MoeParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import load_parameters
from tandem.workers.runner.model_cache import kv_layout
from tests.support.checkpoints import make_model

SHARDS = (Shard(0, 2), Shard(1, 2))
ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "sinks")
COLUMNS = ("o_proj", "down_proj")
EXPERTS = {family: {"num_local_experts": 6} for family in ("mixtral", "gpt_oss")}


def naive_slice(name: str, whole: Tensor, rank: int) -> Tensor:
    """A rank's half of a stored tensor, or the whole tensor."""
    if name == "lm_head.weight":
        middle = whole.shape[0] // 2
        return whole[middle:] if rank else whole[:middle]
    if ".experts." in name:
        joined = name.endswith(("_proj", "_bias"))  # one tensor for all experts of a layer
        return whole.chunk(2)[rank] if joined else whole
    if ".qkv_proj." in name:  # 4 heads of q, 2 of k and v
        q, k, v = whole.split([whole.shape[0] // 2, whole.shape[0] // 4, whole.shape[0] // 4])
        return torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
    if ".gate_up_proj." in name:
        return torch.cat([part.chunk(2)[rank] for part in whole.chunk(2)])
    if any(f".{row}." in f"{name}." for row in ROWS):
        return whole.chunk(2)[rank]
    if any(f".{column}.weight" in name for column in COLUMNS):
        return whole.chunk(2, 1)[rank]
    return whole


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3", "gpt_oss", "mixtral", "deepseek_v2", "gemma4"])
def test_each_rank_loads_its_part_of_every_weight(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "PART_BYTES", 1 << 10)  # more than one part each
    make_model(family, **EXPERTS.get(family, {})).save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    with safetensors_file.SafetensorsFile(tmp_path / "model.safetensors") as file:
        stored = list(file.tensors)
    whole = named_weights(config, load_parameters(tmp_path, config), stored)
    held = set[str]()
    for shard in SHARDS:
        of_shard = shard_config(config, shard)
        mine = named_weights(of_shard, load_parameters(tmp_path, of_shard), stored)
        for name, weight in mine.items():
            assert torch.equal(weight, naive_slice(name, whole[name], shard.rank)), name
        held |= mine.keys()
    assert held == whole.keys()


def test_a_shard_has_half_of_the_parameters_that_ranks_divide(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    for shard in SHARDS:
        layer = load_parameters(tmp_path, shard_config(config, shard), load_format="dummy").layers[0]
        assert isinstance(layer.feed_forward, GatedParameters)
        assert layer.attention is not None
        assert layer.feed_forward.down.tensor().shape == (config.hidden_size, config.intermediate_size // 2)
        assert layer.attention.o.tensor().shape == (config.hidden_size, config.num_heads * config.head_dim // 2)


def test_a_shard_has_half_of_the_experts_and_the_whole_router(tmp_path: Path) -> None:
    make_model("mixtral", **EXPERTS["mixtral"]).save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    assert config.moe is not None
    half = config.moe.num_experts // 2
    assert [shard_config(config, shard).experts for shard in SHARDS] == [range(half), range(half, 2 * half)]
    layer = load_parameters(tmp_path, shard_config(config, SHARDS[1])).layers[0]
    assert isinstance(layer.feed_forward, MoeParameters)
    assert layer.feed_forward.gate_up.count == half
    assert layer.feed_forward.router.rows == 2 * half


def test_layouts_of_shards_have_half_the_heads_and_fingerprints_of_their_own(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    whole, *halves = (kv_layout(shard_config(config, shard), 16) for shard in (WHOLE, *SHARDS))
    assert [half.groups[0].num_kv_heads * 2 for half in halves] == 2 * [whole.groups[0].num_kv_heads]
    assert [half.token_bytes * 2 for half in halves] == 2 * [whole.token_bytes]
    assert len({layout.fingerprint for layout in (whole, *halves)}) == 3


def test_the_map_of_another_shard_is_refused(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    whole, first, second = (kv_layout(shard_config(config, shard), 16) for shard in (WHOLE, *SHARDS))
    wire = encode_map(PositionMap(0, (SlotRuns.from_slots([0, 1, 2]),)), first)
    for layout in (whole, second):
        with pytest.raises(InvalidPositionMap, match="layout_fingerprint"):
            decode_map(wire, layout, num_pages=(4,), expected_start=0, expected_tokens=3)
    assert decode_map(wire, first, num_pages=(4,), expected_start=0, expected_tokens=3).num_tokens == 3


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [("num_heads", 3, "multiple"), ("num_kv_heads", 3, "multiple or a divisor"), ("intermediate_size", 33, "multiple")],
    ids=str,
)
def test_sizes_that_ranks_cannot_divide_are_named(field: str, value: Any, accepted: str, tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    config = replace(load_config(tmp_path, "float32"), **{field: value})
    with pytest.raises(InvalidArgument, match=f"{field} is {value}; it must be a {accepted} of the 2 ranks"):
        shard_config(config, SHARDS[0])


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2)])
def test_ranks_outside_are_refused(rank: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="of the shard is"):
        Shard(rank, size)
