"""Each rank reads its part of a recurrent layer's tensors: the real loader against what is taken head by head."""

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.cache.plan.shard import WHOLE, Shard
from tandem.workers.checkpoint import safetensors_file
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.recurrent.parameters import RecurrentParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import load_parameters
from tandem.workers.runner.model_cache import kv_layout
from tests.support.checkpoints import make_model, sizes_for_ranks

SERVING = 2  # heads of the cases that serve others
VALUE_DIM = {"kimi_linear": 10, "nemotron_h": 10, "qwen3_next": 20, "qwen3_5": 20}
KEY_DIM = {"kimi_linear": 10, "nemotron_h": 12, "qwen3_next": 12, "qwen3_5": 12}
Part = tuple[int, int, list[int]]
"""Numbers in one row: how many heads have them, how many each, and the heads that are held."""


def held(*parts: Part) -> list[int]:
    """Returns the places of the held heads' numbers."""
    begins = accumulate((count * each for count, each, _ in parts), initial=0)
    return [
        begin + head * each + number
        for begin, (_, each, heads) in zip(begins, parts, strict=False)
        for head in heads
        for number in range(each)
    ]


def by_key_head(values: int, heads: list[int], *parts: tuple[bool, int]) -> list[int]:
    """Returns places where all numbers of one key head stand before those of the next. parts: whether value heads have
    them, and how many each."""
    found, of_one = list[int](), values // SERVING
    whole = sum((of_one if of_values else 1) * each for of_values, each in parts)
    for key_head in sorted({head // of_one for head in heads}):
        own = [head % of_one for head in heads if head // of_one == key_head]
        block = [(of_one, each, own) if of_values else (1, each, [0]) for of_values, each in parts]
        found += [key_head * whole + number for number in held(*block)]
    return found


def rows_of(case: str, values: int, heads: list[int]) -> dict[str, list[int]]:
    """Returns for each tensor that ranks divide, by the first name after the block's, the rows held. values: the number
    of heads."""
    serving = sorted({head * SERVING // values for head in heads})
    one, wide = (values, 1, heads), (values, VALUE_DIM[case], heads)
    keys = (SERVING, KEY_DIM[case], serving)
    if case == "kimi_linear":
        of_head = ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj", "g_b_proj", "dt_bias")
        return {"b_proj": held(one), "A_log": held(one), **dict.fromkeys(of_head, held(wide))}
    alike: dict[str, list[int]] = {"A_log": held(one), "dt_bias": held(one)}
    if case == "nemotron_h":
        channels = wide, keys, keys
        alike |= {"D": held(one), "norm": held(wide), "conv1d": held(*channels)}
        return alike | {"in_proj": held(wide, *channels, one)}
    alike["conv1d"] = held(keys, keys, wide)
    if case == "qwen3_5":
        alike |= {"in_proj_qkv": held(keys, keys, wide), "in_proj_z": held(wide)}
        return alike | dict.fromkeys(("in_proj_b", "in_proj_a"), held(one))
    qkvz = by_key_head(values, heads, (False, 12), (False, 12), (True, 20), (True, 20))
    return alike | {"in_proj_qkvz": qkvz, "in_proj_ba": by_key_head(values, heads, (True, 1), (True, 1))}


def naive_part(case: str, name: str, stored: Tensor, shard: Shard) -> Tensor:
    """name: after the block's."""
    values = 8 if shard.size == 4 else 6
    each = values // shard.size
    heads, first = list(range(shard.rank * each, (shard.rank + 1) * each)), name.split(".")[0]
    if name in ("o_proj.weight", "out_proj.weight"):
        return stored[:, held((values, VALUE_DIM[case], heads))]
    rows = rows_of(case, values, heads).get(first)
    if rows is None:
        return stored
    return stored[:, :, rows] if stored.dim() == 4 else stored[rows]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", VALUE_DIM)
def test_each_rank_loads_its_heads(case: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four ranks, each two hold the same heads that serve others."""
    monkeypatch.setattr(safetensors_file, "PART_BYTES", 1 << 10)  # more than one part each
    make_model(case, **sizes_for_ranks(case, size)).save_pretrained(tmp_path)
    config, files = load_config(tmp_path, "float32"), load_file(tmp_path / "model.safetensors")
    files = {name.replace("backbone.", "model."): tensor for name, tensor in files.items()}
    for rank in range(size):
        shard = Shard(rank, size)
        of_shard = shard_config(config, shard)
        found = states_of(of_shard, named_weights(of_shard, load_parameters(tmp_path, of_shard), files))
        assert found
        for name, weight in found.items():
            behind = name.partition(".layers.")[2].split(".", 2)[2]
            assert torch.equal(weight, naive_part(case, behind, files[name], shard)), name


def states_of(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of recurrent layers' blocks."""
    assert config.recurrent is not None
    begins = tuple(f"model.layers.{layer}.{config.recurrent.block}." for layer in config.recurrent.layers)
    return {name: weight for name, weight in weights.items() if name.startswith(begins)}


def test_a_rank_has_half_of_the_products_and_of_the_state(tmp_path: Path) -> None:
    make_model("qwen3_next").save_pretrained(tmp_path)
    config = load_config(tmp_path, "float32")
    shards = [shard_config(config, shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2))]
    whole, *halves = (load_parameters(tmp_path, one, load_format="dummy").layers[0].attention for one in shards)
    assert isinstance(whole, RecurrentParameters)
    for half in halves:
        assert isinstance(half, RecurrentParameters)
        assert (2 * half.inputs.rows, 2 * half.o.columns) == (whole.inputs.rows, whole.o.columns)
    layouts = [kv_layout(one, 16) for one in shards]
    assert [2 * one.page_bytes(1) for one in layouts[1:]] == [layouts[0].page_bytes(1)] * 2
    assert len({one.fingerprint for one in layouts}) == 3
