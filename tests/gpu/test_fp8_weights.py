"""Products with weights in FP8 on a GPU, alone and in models, against the same weights dequantized."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Limits
from tandem.workers.kernels.decode_megakernel.megakernel import ROW_COUNTS, MegakernelArguments, MegakernelLaunch
from tandem.workers.kernels.expert_blocks import block_rows, expert_blocks
from tandem.workers.kernels.torch.layer import grouped_linear
from tandem.workers.weights.dense import DenseStack
from tandem.workers.weights.fp8 import Fp8, Fp8Stack
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import make_model
from tests.support.oracle import random_prompt
from tests.support.quantized_checkpoints import CHANNEL, DEEPSEEK, Quantize, blocks_of, by_rows, quantize_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
BLOCK = (128, 128)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
WIDE = {
    "hidden_size": 640, "intermediate_size": 4608, "head_dim": 64,
    "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 600,
}  # fmt: skip


def as_subnormals(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Quantizes by rows, to numbers up to 0.05. Most are below 2 ** -6, the least normal number."""
    scales = (weight.abs().amax(1, keepdim=True) * 20).bfloat16()
    numbers = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale": scales, "meant": numbers.float() * scales.float()}


SCHEMES: dict[str, tuple[dict[str, Any], Quantize]] = {
    "blocks": (DEEPSEEK | {"weight_block_size": list(BLOCK)}, blocks_of(BLOCK)),
    "small blocks": (DEEPSEEK, blocks_of((32, 16))),
    "rows": (CHANNEL, by_rows),
}
SCHEMES_OF_STEPS = {name: SCHEMES[name] for name in ("blocks", "rows")} | {"subnormal": (CHANNEL, as_subnormals)}
MOST_OF_LOGITS = 0.15
FEW, MANY = 0.01, 0.05  # errors of products, to their largest number: with activations in 16 bits, and in 8


def random_fp8(rows: int, columns: int, grouped: bool, *lead: int) -> tuple[Tensor, Tensor, int]:
    numbers = torch.randn(*lead, rows, columns, device="cuda").mul_(64).to(torch.float8_e4m3fn)
    group = 128 if grouped else columns
    scales = torch.rand(*lead, -(-rows // 128) if grouped else rows, columns // group, device="cuda").add_(0.5)
    scales = scales.repeat_interleave(128, -2)[..., :rows, :] if grouped else scales
    return numbers, (scales / 64 / columns**0.5).contiguous(), group


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("grouped", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (1040, 512), (200, 384)])
def test_products_of_any_number_of_rows(grouped: bool, rows: int, columns: int) -> None:
    """200 rows are none of cuBLASLt's."""
    numbers, scales, group = random_fp8(rows, columns, grouped)
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    weight = Fp8(numbers, scales, bias, group, torch.bfloat16)
    product, meant = weight.prepare(), weight.tensor().float()
    for tokens in (1, 2, 16, 17, 40, 64, 65, 300):
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        expected = F.linear(x.float(), meant, bias.float())
        assert error(product.linear(x), expected) < (FEW if tokens <= 16 else MANY), tokens


@pytest.mark.parametrize("grouped", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize("tokens", [1, 20, 600])
def test_products_with_experts(grouped: bool, tokens: int) -> None:
    numbers, scales, group = random_fp8(768, 512, grouped, 16)
    stack = Fp8Stack(numbers, scales, None, group, torch.bfloat16)
    meant = DenseStack(torch.stack([stack.one(index).tensor() for index in range(16)]))
    experts = torch.rand(tokens, 16, device="cuda").topk(4).indices
    blocks = expert_blocks(experts, 16, block_rows(experts.numel(), 16))
    x, scale = torch.randn(tokens, 512, device="cuda").bfloat16(), torch.rand(4 * tokens, device="cuda")
    expected = grouped_linear(x.float(), meant, blocks, scale, 4)
    assert error(stack.grouped(x, blocks, scale, 4), expected) < (FEW if tokens < 100 else MANY)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_logits_are_those_of_the_dequantized_model(family: str, scheme: str, tmp_path: Path) -> None:
    """Compares a prompt and steps, in 16 bits, with float32, which dequantizes weights for each product.

    Each token takes all experts: with few experts, a rounding would choose others.
    """
    experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 4}
    make_model(family, **SIZES, **(experts if family == "qwen3_moe" else {})).save_pretrained(tmp_path)
    quantize_folder(tmp_path, *SCHEMES[scheme])
    ours, exact = (CachedModel(tmp_path, dtype, "cuda") for dtype in ("bfloat16", "float32"))
    for model in (ours, exact):
        model.cache.add_sequence(0)
    for tokens in (random_prompt(90, seed=1), *([token] for token in random_prompt(3, seed=2))):
        assert error(ours.step({0: tokens}), exact.step({0: tokens})) < MOST_OF_LOGITS


@pytest.mark.parametrize("scheme", SCHEMES_OF_STEPS)
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "bfloat16"), ("qwen2", "float16")])
@torch.inference_mode()
def test_steps_of_few_rows_are_one_launch(
    family: str, dtype: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every multiprocessor has a share of each product of the model, which is compared with float32. `down` of eight
    rows is gathered in two pieces."""
    make_model(family, **WIDE).save_pretrained(tmp_path)
    quantize_folder(tmp_path, *SCHEMES_OF_STEPS[scheme])
    launches: list[MegakernelLaunch] = []
    launch = MegakernelLaunch.__call__

    def count(kernel: MegakernelLaunch, arguments: MegakernelArguments) -> None:
        launches.append(kernel)
        launch(kernel, arguments)

    monkeypatch.setattr(MegakernelLaunch, "__call__", count)
    ours, exact = (CachedModel(tmp_path, one, "cuda") for one in (dtype, "float32"))
    for sequence in range(max(ROW_COUNTS)):
        for model in (ours, exact):
            model.cache.add_sequence(sequence)
            model.step({sequence: random_prompt(5 + 11 * sequence, seed=sequence)})
    decoder = ours.runner._model
    for number, rows in enumerate((*ROW_COUNTS, *ROW_COUNTS), 1):
        (buffers,) = ours.cache.graph_buffers([Limits.of_step(rows, decoder.config.num_heads, 1)])
        tokens = np.arange(rows) + 7 * number
        ours.cache.begin(Batch(np.arange(rows)), buffers, [tokens])
        logits = decoder.forward(buffers.inputs[0], buffers.attention(), None)
        expected = exact.step({row: [int(token)] for row, token in enumerate(tokens)})
        assert error(logits, expected) < MOST_OF_LOGITS
        assert len(launches) == number
    assert len(set(launches)) == len(ROW_COUNTS)
