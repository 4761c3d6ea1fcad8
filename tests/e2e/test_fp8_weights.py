"""Weights that stay in FP8, served in all ways that requests go: tokens are those of the dequantized model."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.checkpoints import make_model
from tests.support.client_requests import GREEDY, complete, complete_all
from tests.support.island import running_island
from tests.support.likely_drafters import make_llama, make_mtp, make_smaller
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.quantized_checkpoints import (
    CHANNEL,
    DEEPSEEK,
    MODELOPT,
    SINGLE,
    Quantize,
    all_but,
    blocks_of,
    by_rows,
    by_tensor,
    compressed_tensors,
    quantize_folder,
)

BLOCK = (128, 128)
BLOCKS = DEEPSEEK | {"weight_block_size": list(BLOCK)}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
SCHEMES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "blocks": ("qwen3", BLOCKS, blocks_of(BLOCK)),
    "blocks of experts": ("qwen3_moe", BLOCKS, blocks_of(BLOCK)),
    "rows": ("llama", CHANNEL, by_rows),
    "tensor": ("llama", compressed_tensors("tensor"), by_tensor),
    "modelopt": ("qwen3", MODELOPT, by_tensor),
}
PROMPTS = [random_prompt(5 + 13 * number, seed=number) for number in range(5)]


def save(scheme: str, folder: Path, output: int) -> tuple[Path, Sequence[Sequence[int]]]:
    """Saves a checkpoint. Returns it with the tokens after PROMPTS that transformers finds with dequantized weights."""
    family, config, quantize = SCHEMES[scheme]
    model = make_model(family, **SIZES, **({"moe_intermediate_size": 128} if family == "qwen3_moe" else {}))
    model.save_pretrained(folder / "plain")
    quantized = shutil.copytree(folder / "plain", folder / "model")
    meant = quantize_folder(quantized, config, quantize)
    save_file({name: one.contiguous() for name, one in meant.items()}, folder / "plain" / SINGLE, {"format": "pt"})
    return quantized, greedy_all(load_oracle(folder / "plain"), PROMPTS, output)


@pytest.mark.gate("blocks")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_prefixes_that_are_found_again_and_requests_that_move(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_back_and_forth(2, monkeypatch)
    folder, due = save(scheme, tmp_path, 24)
    settings = {"model.dtype": "float32", "scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    with running_island(folder, settings) as island, island.client() as client:
        assert client.model_info().quantization == "fp8"
        for _ in range(2):
            assert complete_all(island.address, PROMPTS, max_tokens=24, **GREEDY) == due


@pytest.mark.gate("blocks of experts")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_ranks(scheme: str, tmp_path: Path) -> None:
    folder, due = save(scheme, tmp_path, 9)
    ranks = {"island.prefill_ranks": 1, "island.decode_ranks": 2, "island.verify_kv": False}
    with running_island(folder, {"model.dtype": "float32", "scheduler.max_batch_tokens": 48, **ranks}) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=9, **GREEDY) == due


@pytest.mark.gate("mtp")
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_drafters_in_fp8(method: str, tmp_path: Path) -> None:
    model = make_mtp(tmp_path / "model") if method == "mtp" else make_llama(tmp_path / "model")
    settings: dict[str, Any] = {"speculation.method": method, "speculation.tokens": 3, "island.num_decode": 1}
    if method == "draft_model":
        draft = make_smaller(tmp_path / "draft", model)
        quantize_folder(draft, CHANNEL, by_rows)
        settings["speculation.draft"] = str(draft)
    quantize_folder(model, CHANNEL, by_rows)
    prompts = [random_prompt(length, seed=length, vocab_size=512) for length in (3, 20, 45)]
    with running_island(model) as plain:
        due = complete_all(plain.address, prompts, max_tokens=30, **GREEDY)
    with running_island(model, settings) as island:
        assert complete_all(island.address, prompts, max_tokens=30, **GREEDY) == due
        usage = complete(island.address, prompts[1], max_tokens=30, **GREEDY)[-1].usage
        assert usage is not None
        assert usage.accepted_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5_moe"])
def test_a_layer_in_fp8_drafts_beside_states(arch: str, tmp_path: Path) -> None:
    """The checkpoint is as published: what joins the embedding and the hidden state keeps 16 bits, and experts are one
    by one."""
    model = make_mtp(tmp_path / "model", arch)
    meant = shutil.copytree(model, tmp_path / "meant")
    tensors = quantize_folder(model, CHANNEL, all_but("mtp.fc", all_but("conv1d", by_rows)))
    save_file({name: one.contiguous() for name, one in tensors.items()}, meant / SINGLE, {"format": "pt"})
    prompts = [random_prompt(length, seed=length, vocab_size=512) for length in (3, 20, 45)]
    due = greedy_all(load_oracle(meant), prompts, 30)
    settings = {"model.dtype": "float32", "speculation.method": "mtp"}
    with running_island(model, settings) as island, island.client() as client:
        assert complete_all(island.address, prompts, max_tokens=30, **GREEDY) == due
        (info,) = client.cluster_info().islands
        counters = info.workers[1].counters
        assert counters.drafted_tokens / 4 < counters.accepted_tokens
