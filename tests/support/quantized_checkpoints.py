"""Tiny checkpoints in the layouts of published quantized ones, made from the tiny checkpoints of tests.support."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_MAX = 448.0
SINGLE = "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Quantize = Callable[[str, Tensor], dict[str, Tensor]]
KEPT = ("embed_tokens", "lm_head", "norm", ".gate.weight", "router")  # never quantized

BLOCK = (32, 16)
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
V4 = {**DEEPSEEK, "scale_fmt": "ue8m0"}


def compressed_tensors(strategy: str, **weights: Any) -> dict[str, Any]:
    """Returns quantization_config as llm-compressor writes it. weights: further fields of the weights."""
    floats = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": floats | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": floats | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


CHANNEL = compressed_tensors("channel")


def quantize_folder(folder: Path, config: dict[str, Any], quantize: Quantize) -> dict[str, Tensor]:
    """Rewrites a checkpoint. Returns the dequantized weights in float32."""
    tensors = load_file(folder / SINGLE)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or any(part in name for part in KEPT):
            stored[name] = meant[name] = tensor
            continue
        made = quantize(name, tensor)
        meant[name] = made.pop("meant")
        stored |= made
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / SINGLE, {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return meant


def split_folder(folder: Path, further: Mapping[str, Tensor] | None = None) -> None:
    """Splits it into two files with an index. Each second tensor is in the other file: scales, too, may be apart from
    their weights."""
    tensors = load_file(folder / SINGLE) | dict(further or {})
    (folder / SINGLE).unlink()
    weight_map = {name: SHARDS[index % 2] for index, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(part, folder / shard, {"format": "pt"})
    (folder / f"{SINGLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def blocks_of(block: tuple[int, int], ending: str = "_scale_inv", dtype: torch.dtype = torch.float32) -> Quantize:
    """Quantizes with a scale for each block, also for blocks cut off at the edges. dtype: of the scales."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
        padded[:rows, :columns] = weight
        blocks = padded.view(grid[0], block[0], grid[1], block[1])
        scales = (blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / FP8_MAX).to(dtype)
        of_blocks = scales.float()[:, None, :, None]
        numbers = (blocks / of_blocks).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        meant = (numbers.float() * of_blocks).view(padded.shape)[:rows, :columns]
        stored = numbers.view(padded.shape)[:rows, :columns]
        return {name: stored, f"{name}{ending}": scales, "meant": meant}

    return quantize


by_blocks = blocks_of(BLOCK)


def as_deepseek_v4(block: tuple[int, int]) -> Quantize:
    """Quantizes experts in 4 bits, and products of attention and of the shared expert in 8. Scales are exponents of
    two."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        scales = f"{name.removesuffix('weight')}scale"
        if ".experts." in name:
            generator = torch.Generator().manual_seed(len(name) + int(name.split(".experts.")[1].split(".")[0]))
            rows, columns = weight.shape
            packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(120, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
            meant = naive_fours(packed.view(1, rows, columns // 32, 16), exponents[None])[0].T.contiguous()
            return {name: packed.view(torch.int8), scales: exponents.view(torch.float8_e8m0fnu), "meant": meant}
        if not any(part in name for part in (".wq_", ".wkv.", ".wo_", ".shared_experts.")) or ".compressor." in name:
            return {name: weight, "meant": weight}
        made = blocks_of(block, dtype=torch.float8_e8m0fnu)(name, weight)
        made[scales] = made.pop(f"{name}_scale_inv")
        return made

    return quantize


def all_but(kept: str, quantize: Quantize) -> Quantize:
    """Leaves weights with `kept` in their names unchanged, as configs list them."""
    return lambda name, weight: {name: weight, "meant": weight} if kept in name else quantize(name, weight)


def by_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes as llm-compressor does, with scales in bfloat16."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / FP8_MAX).bfloat16()
    stored = (weight / scales.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale": scales, "meant": stored.float() * scales.float()}


def by_tensor(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes as AutoFP8 does, which stores a scale of the activations, too."""
    scale = weight.abs().max() / FP8_MAX
    stored = (weight / scale).to(torch.float8_e4m3fn)
    module = name.removesuffix(".weight")
    beside = {f"{name}_scale": scale, f"{module}.input_scale": torch.tensor(0.02)}
    return {name: stored, **beside, "meant": stored.float() * scale}


def by_tensor_inverse(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes as Mistral does, whose names are the names of block scales."""
    made, module = by_tensor(name, weight), name.removesuffix(".weight")
    beside = {f"{name}_scale_inv": made[f"{name}_scale"], f"{module}.activation_scale": made[f"{module}.input_scale"]}
    return {name: made[name], **beside, "meant": made["meant"]}


def by_tensor_of_one(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes as llm-compressor does, with scales of shape [1]."""
    made = by_tensor(name, weight)
    return {name: made[name], f"{name}_scale": made[f"{name}_scale"].view(1), "meant": made["meant"]}


def by_fours(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes gpt_oss's experts, [E, inputs, outputs], as OpenAI stores them: random numbers of 4 bits, two in a
    byte."""
    if "experts" not in name or name.endswith("_bias"):
        return {name: weight, "meant": weight}
    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(len(name) + experts)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(117, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales, "meant": naive_fours(blocks, scales)}


def naive_fours(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes bit by bit: sign, two bits of exponent, one of mantissa; the low half of a byte comes first."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    sign, exponent, mantissa = halves >> 3, (halves >> 1) & 3, halves & 1
    value = torch.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent.float() - 1))
    scaled = torch.where(sign == 1, -value, value) * 2.0 ** (scales.float()[..., None] - 127)
    return scaled.flatten(-2).transpose(1, 2).contiguous()
