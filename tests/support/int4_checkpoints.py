"""Tiny checkpoints of integers in 4 bits, in the layouts of AWQ, GPTQ and compressed-tensors."""

from typing import Any

import torch
from torch import Tensor

from tests.support.quantized_checkpoints import Quantize

GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq(*, sym: bool = True, act_order: bool = False, version: str = "gptq", group: int = GROUP) -> dict[str, Any]:
    """Returns quantization_config as GPTQModel writes it."""
    sizes = {"bits": 4, "group_size": group, "sym": sym, "desc_act": act_order, "pack_dtype": "int32"}
    return {"quant_method": "gptq", "checkpoint_format": version, "lm_head": False, **sizes}


def pack_quantized(group: int | None = GROUP, *, symmetric: bool = True, act_order: bool = False) -> dict[str, Any]:
    """Returns quantization_config as llm-compressor writes it."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": "group" if act_order else None,
    }
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group_0},
    }


def as_awq(group: int = GROUP) -> Quantize:
    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales, zeros, _, meant = _numbers(weight, group, asymmetric=True)
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": _words(numbers.T, AWQ_ORDER),
            f"{module}.qzeros": _words(zeros.T, AWQ_ORDER),
            f"{module}.scales": scales.T,
            "meant": meant,
        }

    return quantize


def as_gptq(*, sym: bool = True, act_order: bool = False, version: str = "gptq", group: int = GROUP) -> Quantize:
    """Quantizes as GPTQ does. Modules whose products take the same input have the same order."""

    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        size = weight.shape[1] if group == -1 else group
        numbers, scales, zeros, owners, meant = _numbers(weight, size, asymmetric=not sym, act_order=act_order)
        module = name.removesuffix(".weight")
        stored = zeros - 1 if version == "gptq" else zeros
        return {
            f"{module}.qweight": _words(numbers).T,
            f"{module}.qzeros": _words(stored.T & 15),
            f"{module}.scales": scales.T,
            f"{module}.g_idx": owners.int(),
            "meant": meant,
        }

    return quantize


def as_pack_quantized(group: int | None = GROUP, *, symmetric: bool = True, act_order: bool = False) -> Quantize:
    def quantize(name: str, weight: Tensor) -> dict[str, Tensor]:
        size = weight.shape[1] if group is None else group
        numbers, scales, zeros, owners, meant = _numbers(weight, size, asymmetric=not symmetric, act_order=act_order)
        module = name.removesuffix(".weight")
        made = {
            f"{module}.weight_packed": _words(numbers),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(weight.shape),
            "meant": meant,
        }
        if not symmetric:
            made[f"{module}.weight_zero_point"] = _words(zeros.T).T
        if act_order:
            made[f"{module}.weight_g_idx"] = owners.int()
        return made

    return quantize


def _numbers(
    weight: Tensor, group: int, *, asymmetric: bool, act_order: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Numbers int64 [R, C], float16 scales and int64 zeros [R, C / group], the group of each column, and what they
    mean, float32."""
    columns = weight.shape[1]
    generator = torch.Generator().manual_seed(columns)
    owners = torch.arange(columns) // group
    if act_order:
        owners = owners[torch.randperm(columns, generator=generator)]
    scales = torch.stack([weight[:, owners == one].abs().amax(1) for one in range(columns // group)], 1) / 7
    scales = scales.clamp(min=1e-4).half()
    zeros = torch.full(scales.shape, 8)
    if asymmetric:
        zeros = torch.randint(6, 11, scales.shape, generator=generator)
    of_columns = scales.float()[:, owners], zeros[:, owners]
    numbers = ((weight / of_columns[0]).round().long() + of_columns[1]).clamp(0, 15)
    return numbers, scales, zeros, owners, (numbers - of_columns[1]) * of_columns[0]


def _words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [R, ceil(C / 8)]: position p of a word, from the low bits, has the order[p]-th of 8 numbers."""
    rows, columns = numbers.shape
    padded = torch.zeros(rows, -(-columns // 8) * 8, dtype=torch.int64)
    padded[:, :columns] = numbers
    words = torch.zeros(rows, padded.shape[1] // 8, dtype=torch.int64)
    for position, one in enumerate(order):
        words |= padded[:, one::8] << 4 * position
    return words.to(torch.int32)
