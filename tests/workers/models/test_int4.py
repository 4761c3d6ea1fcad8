"""Checkpoints of integers in 4 bits: what is loaded, packed and dequantized, whole and by ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cache.plan.shard import Shard
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, UnsupportedFeature
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice
from tandem.workers.checkpoint.stored import MAX_PART_BYTES
from tandem.workers.models.parameters import AttentionParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import check_weights, load_parameters
from tandem.workers.weights.dense import Dense
from tandem.workers.weights.formats.registry import read_quantization, stored_weights
from tandem.workers.weights.packed import Packed, PackedStack
from tests.support.checkpoints import save_checkpoint
from tests.support.dense_parameters import in_dense
from tests.support.int4_checkpoints import AWQ, as_awq, as_gptq, as_pack_quantized, gptq, pack_quantized
from tests.support.made_tensors import MadeTensors
from tests.support.quantized_checkpoints import MXFP4, SINGLE, Quantize, all_but, quantize_folder

WHOLE_ROW = -1
CASES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "llama-awq": ("llama", AWQ, as_awq()),
    "qwen3_moe-awq": ("qwen3_moe", AWQ | {"group_size": 8}, as_awq(8)),
    "llama-awq-not-converted": (
        "llama",
        AWQ | {"modules_to_not_convert": ["model.layers.0.self_attn"]},
        all_but("layers.0.self_attn", as_awq()),
    ),
    "llama-gptq": ("llama", gptq(), as_gptq()),
    "llama-gptq-asymmetric": ("llama", gptq(sym=False), as_gptq(sym=False)),
    "llama-gptq-act-order": ("llama", gptq(sym=False, act_order=True), as_gptq(sym=False, act_order=True)),
    "llama-gptq-2": (
        "llama",
        gptq(sym=False, version="gptq_v2"),
        as_gptq(sym=False, version="gptq_v2"),
    ),
    "llama-gptq-rows": ("llama", gptq(group=WHOLE_ROW), as_gptq(group=WHOLE_ROW)),
    "qwen3_moe-gptq-act-order": ("qwen3_moe", gptq(act_order=True, group=8), as_gptq(act_order=True, group=8)),
    "llama-pack-quantized": ("llama", pack_quantized(), as_pack_quantized()),
    "llama-pack-quantized-asymmetric": ("llama", pack_quantized(symmetric=False), as_pack_quantized(symmetric=False)),
    "llama-pack-quantized-rows": ("llama", pack_quantized(None), as_pack_quantized(None)),
    "llama-pack-quantized-act-order": ("llama", pack_quantized(act_order=True), as_pack_quantized(act_order=True)),
    "deepseek_v3-pack-quantized": ("deepseek_v3", pack_quantized(8), as_pack_quantized(8)),
}


def save_int4(case: str, folder: Path) -> dict[str, Tensor]:
    """The weights as they count, float32."""
    family, config, quantize = CASES[case]
    save_checkpoint(family, folder)
    return quantize_folder(folder, config, quantize)


@pytest.mark.gate("llama-awq*", "qwen3_moe-*", "llama-gptq-act-order", "llama-gptq-2", "llama-pack-*", "deepseek*")
@pytest.mark.parametrize("case", CASES)
def test_weights_stay_packed_and_mean_what_was_stored(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a weight takes many parts."""
    monkeypatch.setattr("tandem.workers.weights.formats.int4.PART_NUMBERS", 1000)
    meant = save_int4(case, tmp_path)
    config = load_config(tmp_path, "float32")
    check_weights(tmp_path, config)
    parameters = load_parameters(tmp_path, config)
    packed = [type(one) for layer in parameters.layers for one in matrices(layer)]
    kept = 1 if case == "llama-awq-not-converted" else 0
    assert len([one for one in packed if one in (Packed, PackedStack)]) >= len(packed) - 2 * kept
    for name, tensor in named_weights(config, in_dense(parameters), meant).items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name


def matrices(layer: Any) -> list[Any]:
    attention, feed_forward = layer.attention, layer.feed_forward
    held = [attention.o, feed_forward.gate_up, feed_forward.down]
    return [*held, attention.qkv] if isinstance(attention, AttentionParameters) else [*held, attention.down]


@pytest.mark.parametrize(
    "case", ["llama-awq", "llama-gptq-asymmetric", "llama-pack-quantized-asymmetric", "qwen3_moe-awq"]
)
def test_each_rank_loads_its_part_of_every_weight(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.workers.weights.formats.int4.PART_NUMBERS", 300)
    meant = save_int4(case, tmp_path / "model")
    save_checkpoint(CASES[case][0], tmp_path / "plain")
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, tmp_path / "plain" / SINGLE)
    for rank in range(2):
        loaded = list[dict[str, Tensor]]()
        for name in ("model", "plain"):
            config = shard_config(load_config(tmp_path / name, "float32"), Shard(rank, 2))
            loaded.append(named_weights(config, in_dense(load_parameters(tmp_path / name, config)), meant))
        ours, expected = loaded
        assert ours.keys() == expected.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("family", "section", "kept"), [("llama", AWQ, "1.self_attn"), ("gpt_oss", MXFP4, "self_attn")]
)
def test_random_weights_are_drawn_in_the_form_of_the_config(
    family: str, section: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    save_checkpoint(family, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    modules = {"modules_to_not_convert": [f"model.*.{kept}"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": section | modules}))
    parameters = load_parameters(tmp_path, load_config(tmp_path, "float32"), load_format="dummy")
    last = parameters.layers[-1]
    assert isinstance(last.attention, AttentionParameters)
    assert type(last.attention.qkv) is Dense
    assert last.feed_forward is not None
    down = last.feed_forward.down
    one = down if isinstance(down, Packed) else down.one(1)  # type: ignore[union-attr]
    assert isinstance(one, Packed)
    assert 0.01 < float(one.tensor().std()) < 0.04


def test_resident_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    """They are in the dtype of the scales. A zero takes a byte each, so groups are of 32 columns or more."""
    for case in (AWQ | {"group_size": 32}, as_awq(32)), (pack_quantized(32), as_pack_quantized(32)):
        save_checkpoint("llama", tmp_path)
        quantize_folder(tmp_path, *case)
        parameters = load_parameters(tmp_path, load_config(tmp_path, "float16"))
        held = [tensor for layer in parameters.layers for one in matrices(layer) for tensor in one.tensors().values()]
        stored = [one for name, one in load_file(tmp_path / SINGLE).items() if "proj" in name and "shape" not in name]
        assert sum(one.nbytes for one in held) <= 1.03 * sum(one.nbytes for one in stored)


def test_a_head_that_is_packed_in_its_file_is_dequantized(tmp_path: Path) -> None:
    """Its rows fill no whole number of words."""
    save_int4("llama-pack-quantized-asymmetric", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    made = as_pack_quantized(symmetric=False)("lm_head.weight", tensors.pop("lm_head.weight"))
    meant = made.pop("meant")
    save_file(tensors | {name: one.contiguous() for name, one in made.items()}, tmp_path / SINGLE)
    parameters = load_parameters(tmp_path, load_config(tmp_path, "float32"))
    assert torch.equal(parameters.lm_head.tensor(), meant)


def test_parts_in_orders_of_their_own_are_dequantized(tmp_path: Path) -> None:
    """Products of fused parts take one order of columns; here q has another than k and v."""
    meant = save_int4("llama-gptq-act-order", tmp_path)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    tensors = load_file(tmp_path / SINGLE)
    tensors[name] = torch.arange(64, dtype=torch.int32) // 16
    save_file(tensors, tmp_path / SINGLE)
    config = load_config(tmp_path, "float32")
    first, second = load_parameters(tmp_path, config).layers
    kinds = [type(one.attention.qkv) for one in (first, second) if isinstance(one.attention, AttentionParameters)]
    assert kinds == [Dense, Packed]
    assert isinstance(first.attention, AttentionParameters)
    k = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(first.attention.qkv.tensor()[64:96], meant[k])


def test_ranks_cannot_divide_columns_in_the_order_of_activations(tmp_path: Path) -> None:
    save_int4("llama-gptq-act-order", tmp_path)
    config = shard_config(load_config(tmp_path), Shard(0, 2))
    with pytest.raises(InvalidWeights, match=r"o_proj.weight have columns of all ranks, since act-order .* 1 rank can"):
        check_weights(tmp_path, config)


def test_ranks_that_would_divide_a_group_are_told_which_can(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    quantize_folder(tmp_path, pack_quantized(32), all_but("down_proj", as_pack_quantized(32)))
    config = shard_config(load_config(tmp_path), Shard(0, 4))
    with pytest.raises(
        InvalidWeights, match=r"o_proj.weight has groups of 32 columns, .* have 16 of 64; .* that fit are \[1, 2\]"
    ):
        check_weights(tmp_path, config)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("llama-awq", f"{Q}.qzeros", None, rf"{Q}.qweight has shape \[64, 8\]; .* and {Q}.qzeros beside it"),
        (
            "llama-awq",
            f"{Q}.scales",
            torch.ones(3, 64),
            r"q_proj.scales is F32 of \[3, 64\]; for 64 rows of 64 .* \[4, 64\]",
        ),
        ("llama-awq", f"{Q}.qweight", torch.ones(64, 8), r"q_proj.qweight is F32 of \[64, 8\]; .* must be I32 of"),
        ("llama-gptq", f"{Q}.scales", None, rf"and {Q}.scales beside it"),
        ("llama-gptq", f"{Q}.g_idx", torch.full((64,), 4).int(), r"g_idx has torch.int32 from 4 to 4; .* from 0 to 3"),
        ("llama-gptq", f"{Q}.g_idx", torch.zeros(63).int(), r"g_idx is I32 of \[63\]"),
        ("llama-pack-quantized-asymmetric", f"{Q}.weight_zero_point", None, rf"and {Q}.weight_zero_point beside it"),
        ("llama-pack-quantized", f"{Q}.weight_packed", torch.ones(2, 3, 4).int(), "must have two dimensions"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    case: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    save_int4(case, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / SINGLE)
    with pytest.raises(InvalidWeights, match=message):
        check_weights(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (AWQ | {"bits": 8}, "bits is 8; it must be 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point is False; it must be True"),
        (gptq(version="marlin"), "checkpoint_format is 'marlin'; it must be 'gptq' or 'gptq_v2'"),
        (gptq() | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic is .* one format for all modules"),
        (gptq() | {"quant_method": "bitsandbytes"}, "must be 'fp8' or .* or 'awq' or 'gptq' or 'compressed-tensors'"),
    ],
)
def test_other_integers_are_refused(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_int4("llama-awq", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": section}))
    with pytest.raises(UnsupportedFeature, match=message):
        load_config(tmp_path)


def test_a_group_size_that_is_none_is_refused(tmp_path: Path) -> None:
    save_int4("llama-awq", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": AWQ | {"group_size": 0}}))
    with pytest.raises(InvalidConfig, match=r"group_size .* -1 or an integer from 1 to"):
        load_config(tmp_path)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    "case", ["llama-pack-quantized", "llama-pack-quantized-asymmetric", "llama-pack-quantized-rows"]
)
def test_weights_are_those_that_compressed_tensors_unpacks(case: str, tmp_path: Path) -> None:
    import transformers

    save_int4(case, tmp_path)
    dequantize = transformers.CompressedTensorsConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=dequantize, dtype=torch.float16
    )
    theirs = dict(model.state_dict())
    config = load_config(tmp_path, "float16")
    for name, tensor in named_weights(config, in_dense(load_parameters(tmp_path, config)), theirs).items():
        assert torch.equal(tensor, theirs[name]), name


def test_awq_is_unpacked_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    save_int4("llama-awq", tmp_path)
    stored = {name: one for name, one in load_file(tmp_path / SINGLE).items() if name.startswith(Q)}
    converted = AutoAWQConverter(group_size=16).process(stored)
    numbers = unpack_from_int32(converted[f"{Q}.weight_packed"], 4, torch.Size((64, 64)))
    zeros = unpack_from_int32(converted[f"{Q}.weight_zero_point"], 4, torch.Size((64, 4)), packed_dim=0)
    scales = converted[f"{Q}.weight_scale"].float()
    theirs = (numbers.float().unflatten(1, (4, 16)) - zeros[:, :, None]) * scales[:, :, None]
    layer = load_parameters(tmp_path, load_config(tmp_path, "float32")).layers[0]
    assert isinstance(layer.attention, AttentionParameters)
    assert torch.equal(layer.attention.qkv.tensor()[:64], theirs.flatten(1))


@pytest.mark.parametrize("case", ["llama-awq", "llama-gptq-act-order", "llama-pack-quantized-asymmetric"])
@pytest.mark.parametrize("kind", ["weight", "numbers", "scales", "zeros"])
def test_reading_a_part_of_a_large_matrix_takes_little_memory(case: str, kind: str, tmp_path: Path) -> None:
    _, section, quantize = CASES[case]
    made = quantize("x.weight", torch.randn(2048, 2048))
    del made["meant"]
    save_file({name: one.contiguous() for name, one in made.items()}, tmp_path / SINGLE)
    source = Fields({"quantization_config": section}, "config.json")
    with SafetensorsFile(tmp_path / SINGLE) as file:
        weight = stored_weights([file], read_quantization(source))["x.weight"]
        one = weight if kind == "weight" else weight.kept()[kind]
        target = torch.empty(one.shape, dtype=torch.uint8 if kind in ("numbers", "zeros") else torch.float32)
        for part in one.parts(Slice(target)):
            with MadeTensors(target) as made_tensors:
                part.read(torch.empty(0))
            assert 0 < made_tensors.num_bytes <= MAX_PART_BYTES
