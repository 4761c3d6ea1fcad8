"""FP8 and MXFP4 checkpoints: what is loaded, and that tokens equal those of transformers' dequantized model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.shard import Shard
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.checkpoint.safetensors_file import SafetensorsFile, Slice
from tandem.workers.checkpoint.stored import MAX_PART_BYTES
from tandem.workers.models.registry import load_config
from tandem.workers.models.scale_tensors import read_scales
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import check_weights, load_parameters
from tandem.workers.weights.formats.format import Quantization
from tandem.workers.weights.formats.registry import stored_weights
from tests.support.checkpoints import make_model, save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.dense_parameters import in_dense
from tests.support.island import running_island
from tests.support.made_tensors import MadeTensors
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.quantized_checkpoints import (
    BLOCK,
    CHANNEL,
    DEEPSEEK,
    MXFP4,
    SINGLE,
    TENSOR,
    V4,
    Quantize,
    all_but,
    as_deepseek_v4,
    blocks_of,
    by_blocks,
    by_fours,
    by_rows,
    by_tensor,
    by_tensor_of_one,
    compressed_tensors,
    quantize_folder,
)

BLOCKS_OF_COMPRESSED = compressed_tensors("block", block_structure=list(BLOCK))
CASES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "qwen3-blocks": ("qwen3", DEEPSEEK, by_blocks),
    "qwen3_moe-blocks": ("qwen3_moe", DEEPSEEK, by_blocks),
    "deepseek_v3-blocks": ("deepseek_v3", DEEPSEEK, by_blocks),
    "llama-channel": ("llama", CHANNEL, by_rows),
    "llama-blocks-of-compressed-tensors": ("llama", BLOCKS_OF_COMPRESSED, blocks_of(BLOCK, "_scale")),
    "llama-tensor": ("llama", compressed_tensors("tensor"), by_tensor_of_one),
    "mistral-tensor": ("mistral", TENSOR, by_tensor),
    "llama-channel-ignore": (
        "llama",
        CHANNEL | {"ignore": ["lm_head", "re:.*down_proj$"]},
        all_but("down_proj", by_rows),
    ),
    "qwen3-blocks-not-converted": (
        "qwen3",
        DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.0"]},
        all_but("layers.0.", by_blocks),
    ),
    "gpt_oss-mxfp4": ("gpt_oss", MXFP4, by_fours),
    "deepseek_v4-fp4-and-blocks": ("deepseek_v4", V4, as_deepseek_v4(BLOCK)),
}
PROMPTS = [random_prompt(11, seed=1), random_prompt(30, seed=2)]


def save_quantized(case: str, folder: Path) -> dict[str, Tensor]:
    family, config, quantize = CASES[case]
    save_checkpoint(family, folder)
    meant = quantize_folder(folder, config, quantize)
    return {"lm_head.weight" if name == "head.weight" else name: tensor for name, tensor in meant.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_dequantized_into_the_models_dtype(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a weight takes many parts."""
    for module in ("fp8", "mxfp4"):
        monkeypatch.setattr(f"tandem.workers.weights.formats.{module}.PART_NUMBERS", 300)
    meant = save_quantized(case, tmp_path)
    config = load_config(tmp_path, dtype)
    check_weights(tmp_path, config)
    loaded = named_weights(config, in_dense(load_parameters(tmp_path, config)), meant)
    assert loaded.keys() == meant.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_the_dequantized_model(case: str, tmp_path: Path) -> None:
    meant = save_quantized(case, tmp_path / "model")
    plain = shutil.copytree(tmp_path / "model", tmp_path / "plain")
    save_checkpoint(CASES[case][0], plain)
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / SINGLE, {"format": "pt"})
    oracle = load_oracle(plain)
    with running_island(tmp_path / "model", {"model.dtype": "float32"}) as island:
        tokens = complete_all(island.address, PROMPTS, max_tokens=12, **GREEDY)
    assert tokens == [greedy(oracle, prompt, 12) for prompt in PROMPTS]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("gpt_oss-mxfp4", "Mxfp4Config"),
        ("llama-channel", "CompressedTensorsConfig"),
        ("llama-channel-ignore", "CompressedTensorsConfig"),
        ("llama-tensor", "CompressedTensorsConfig"),
    ],
)
def test_weights_are_those_that_transformers_dequantizes(case: str, how: str, tmp_path: Path) -> None:
    import transformers

    save_quantized(case, tmp_path)
    dequantize = getattr(transformers, how)(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=dequantize, dtype=torch.bfloat16
    )
    theirs = dict(model.state_dict())
    config = load_config(tmp_path, "bfloat16")
    ours = named_weights(config, in_dense(load_parameters(tmp_path, config)), theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), theirs[name]), name  # ours keeps norms in float32


def test_every_byte_with_every_exponent_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path, exponents = tmp_path / SINGLE, torch.arange(255, dtype=torch.uint8)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(1, 255, 1, 1)
    scales = exponents[None, :, None].repeat(1, 1, 16)
    save_file({"x_blocks": blocks, "x_scales": scales}, path)
    ours = torch.empty(1, 512, 255)
    with SafetensorsFile(path) as file:
        for part in stored_weights([file], Quantization("mxfp4"))["x"].parts(Slice(ours)):
            part.read(torch.empty(0))
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def test_blocks_are_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    """Blocks are whole: transformers takes no others."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    save_quantized("qwen3-blocks", tmp_path)
    stored_tensors = load_file(tmp_path / SINGLE)
    config = load_config(tmp_path, "bfloat16")
    ours = named_weights(config, in_dense(load_parameters(tmp_path, config)))
    compared = 0
    for name, tensor in ours.items():
        scales = stored_tensors.get(f"{name}_scale_inv")
        if scales is not None and not (tensor.shape[0] % BLOCK[0] or tensor.shape[1] % BLOCK[1]):
            theirs = Fp8Dequantize(None)._dequantize_one(stored_tensors[name], scales, torch.bfloat16)
            assert torch.equal(tensor, theirs), name
            compared += 1
    assert compared >= 8


def test_parts_of_a_matrix_in_4_bits_are_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    """Every byte, every exponent but the one for no number; rows from the middle, and columns within a byte's block."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    path, exponents = tmp_path / SINGLE, torch.arange(255, dtype=torch.uint8)
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(255, 1).view(torch.int8)
    scales = exponents[:, None].repeat(1, 16).contiguous().view(torch.float8_e8m0fnu)
    save_file({"x.weight": packed, "x.scale": scales}, path)
    theirs = Fp8Dequantize(None)._dequantize_one(packed, scales, torch.float32)
    rows, columns = torch.empty(100, 512), torch.empty(255, 45)
    with SafetensorsFile(path) as file:
        weight = stored_weights([file], Quantization("fp8"))["x.weight"]
        for one in (Slice(rows, 0, 155, 255), Slice(columns, 1, 77, 512)):
            for part in weight.parts(one):
                part.read(torch.empty(0))
    assert torch.equal(rows, theirs[155:])
    assert torch.equal(columns, theirs[:, 77:122])


def test_a_config_of_quantized_weights_beside_files_without_any_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    asked = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": asked}))
    with pytest.raises(InvalidWeights, match="quantization_config asks for weights in fp8, and no tensor is stored so"):
        load_parameters(folder, load_config(folder, "float32"))


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / SINGLE)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / SINGLE)


Q = "model.layers.0.self_attn.q_proj.weight"
V4_CASE, V4_EXPERT, V4_Q = (
    "deepseek_v4-fp4-and-blocks",
    "model.layers.0.ffn.experts.3.w1",
    "model.layers.1.attn.wq_a",
)
EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("qwen3-blocks", f"{Q}_scale_inv", None, rf"{Q} is stored as F8_E4M3; it must have {Q}_scale_inv or"),
        (
            "qwen3-blocks",
            f"{Q}_scale_inv",
            torch.ones(3, 3),
            r"shape \[3, 3\] for a weight .* each block of \[32, 16\]",
        ),
        ("llama-channel", f"{Q}_scale", torch.ones(63, 1), r"shape \[63, 1\] .* quantization_config names no block"),
        ("qwen3-blocks", f"{Q}_scale_inv", torch.ones(2, 4, dtype=torch.int8), "scale_inv is stored as I8; a matrix"),
        ("qwen3-blocks", Q, torch.ones(64, 64, dtype=torch.uint8), f"{Q} is stored as U8; it must be one of F32"),
        (V4_CASE, f"{V4_EXPERT}.scale", None, f"{V4_EXPERT}.weight is stored as I8; it must have {V4_EXPERT}.scale"),
        (V4_CASE, f"{V4_EXPERT}.scale", torch.ones(96, 2), r"I8 and F32 .* its scales F8_E8M0 of \[R, C / 32\]"),
        (V4_CASE, f"{V4_EXPERT}.scale", torch.ones(96, 3).to(torch.float8_e8m0fnu), r"shapes \[96, 32\] and \[96, 3\]"),
        (V4_CASE, f"{V4_Q}.scale", None, rf"{V4_Q}.weight is stored as F8_E4M3; it must have .* or {V4_Q}.scale"),
        ("gpt_oss-mxfp4", f"{EXPERTS}_scales", None, f"{EXPERTS}_blocks must have {EXPERTS}_scales beside it"),
        ("gpt_oss-mxfp4", f"{EXPERTS}_scales", torch.ones(5, 64, 2), r"they must be U8 of \[E, R, G, 16\] and"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    case: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    save_quantized(case, tmp_path)
    rewrite(tmp_path, name, tensor)
    with pytest.raises(InvalidWeights, match=message):
        check_weights(tmp_path, load_config(tmp_path))


@pytest.mark.parametrize(
    "case", ["qwen3-blocks", "llama-channel", "deepseek_v3-blocks", "gpt_oss-mxfp4", "qwen3_next-blocks"]
)
def test_each_rank_loads_its_part_of_every_weight(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts begin within blocks of rows, too."""
    monkeypatch.setattr("tandem.workers.weights.formats.fp8.PART_NUMBERS", 300)
    family, how, quantize = CASES.get(case, ("qwen3_next", DEEPSEEK, by_blocks))
    if how is DEEPSEEK:  # blocks of columns that ranks can divide
        how, quantize = DEEPSEEK | {"weight_block_size": [32, 4]}, all_but("conv1d", blocks_of((32, 4)))
    experts = {"num_local_experts": 6} if family == "gpt_oss" else {}
    model = make_model(family, **experts)
    model.save_pretrained(tmp_path / "model")
    meant = quantize_folder(tmp_path / "model", how, quantize)
    model.save_pretrained(tmp_path / "plain")
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


def test_weights_and_kv_may_both_be_in_8_bits(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    meant = quantize_folder(tmp_path, CHANNEL | {"kv_cache_scheme": scheme}, by_rows)
    modules = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    scales = {f"{module}.{which}_scale": torch.tensor([0.5]) for module in modules for which in "kv"}
    save_file(load_file(tmp_path / SINGLE) | scales, tmp_path / SINGLE)
    config = load_config(tmp_path, "float32")
    assert config.quantization == Quantization("fp8", None, ("lm_head",), fp8_kv=True)
    assert read_scales([tmp_path / SINGLE], config) == KVScales.uniform(2, 0.5, 0.5)
    loaded = named_weights(config, in_dense(load_parameters(tmp_path, config)), meant)
    assert torch.equal(loaded[Q], meant[Q])


@pytest.mark.parametrize("grid", [(1, 1), (2048, 1), (16, 16)])
def test_reading_a_part_of_a_large_matrix_takes_little_memory(grid: tuple[int, int], tmp_path: Path) -> None:
    name, path = "x.weight", tmp_path / SINGLE
    save_file({name: torch.zeros(2048, 2048).to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(grid)}, path)
    check_memory(path, Quantization("fp8", (128, 128)), name, torch.empty(2048, 2048))


def test_reading_a_part_of_a_large_matrix_in_4_bits_takes_little_memory(tmp_path: Path) -> None:
    path, packed = tmp_path / SINGLE, torch.zeros(2048, 1024, dtype=torch.int8)
    save_file({"x.weight": packed, "x.scale": torch.ones(2048, 64).to(torch.float8_e8m0fnu)}, path)
    check_memory(path, Quantization("fp8", (128, 128)), "x.weight", torch.empty(2048, 2048))


def test_reading_a_part_of_large_experts_takes_little_memory(tmp_path: Path) -> None:
    path, blocks = tmp_path / SINGLE, torch.zeros(2, 1024, 64, 16, dtype=torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": blocks[..., 0].contiguous()}, path)
    check_memory(path, Quantization("mxfp4"), "x", torch.empty(2, 2048, 1024))


def check_memory(path: Path, quantization: Quantization, name: str, target: Tensor) -> None:
    """Each part makes at most MAX_PART_BYTES in all, though the whole has more."""
    with SafetensorsFile(path) as file:
        parts = stored_weights([file], quantization)[name].parts(Slice(target))
        assert target.nbytes >= MAX_PART_BYTES
        assert len(parts) >= 8
        for part in parts:
            with MadeTensors(target) as made:
                part.read(torch.empty(0))
            assert 0 < made.num_bytes <= MAX_PART_BYTES
