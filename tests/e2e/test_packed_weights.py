"""Weights that stay packed in 4 bits, through the gRPC server: transformers' tokens of the dequantized checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.int4_checkpoints import AWQ, as_awq, as_gptq, as_pack_quantized, gptq, pack_quantized
from tests.support.island import running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.quantized_checkpoints import MXFP4, SINGLE, Quantize, by_fours, quantize_folder

CHUNK, OUTPUT = 48, 12
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 9, 30, 70))]
SCHEMES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "awq": ("llama", AWQ, as_awq()),
    "gptq": ("llama", gptq(), as_gptq()),
    "gptq-act-order": ("qwen3", gptq(act_order=True), as_gptq(act_order=True)),
    "pack-quantized": ("llama", pack_quantized(symmetric=False), as_pack_quantized(symmetric=False)),
    "pack-quantized-experts": ("qwen3_moe", pack_quantized(8), as_pack_quantized(8)),
    "mxfp4": ("gpt_oss", MXFP4, by_fours),
}
ROOM = {"scheduler.max_batch_tokens": CHUNK, "model.dtype": "float32"}


def save(scheme: str, folder: Path, *, prompts: list[list[int]] = PROMPTS, output: int = OUTPUT) -> list[list[int]]:
    """Saves the checkpoint in `folder`. Returns the expected tokens."""
    family, config, quantize = SCHEMES[scheme]
    save_checkpoint(family, folder / "model")
    plain = shutil.copytree(folder / "model", folder / "plain")
    meant = quantize_folder(folder / "model", config, quantize)
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / SINGLE, {"format": "pt"})
    return greedy_all(load_oracle(plain), prompts, output)


@pytest.mark.gate("awq", "gptq-act-order", "pack-quantized-experts", "mxfp4")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_with_prefixes_and_drafts(scheme: str, tmp_path: Path) -> None:
    """Prefill and decode have workers of their own. Prompts come alone, then all at once and twice, which finds
    prefixes."""
    due = save(scheme, tmp_path)
    drafts = {"speculation.method": "ngram", "speculation.tokens": 3}
    with running_island(tmp_path / "model", ROOM | drafts) as island:
        for prompt, tokens in zip(PROMPTS[1:3], due[1:3], strict=True):
            assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == tokens
        assert complete_all(island.address, PROMPTS * 2, max_tokens=OUTPUT, **GREEDY) == due * 2


@pytest.mark.gate("pack-quantized", "mxfp4")
@pytest.mark.parametrize("scheme", ["awq", "gptq", "pack-quantized", "mxfp4"])
def test_tokens_of_two_ranks(scheme: str, tmp_path: Path) -> None:
    due = save(scheme, tmp_path)
    ranks = {"island.prefill_ranks": 1, "island.decode_ranks": 2, "island.verify_kv": False}
    with running_island(tmp_path / "model", ROOM | ranks) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == due


@pytest.mark.gate("awq")
@pytest.mark.parametrize("scheme", ["awq", "mxfp4"])
def test_requests_that_move(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_back_and_forth(2, monkeypatch)
    prompts = [random_prompt(5 + 9 * number, seed=number) for number in range(6)]
    due = save(scheme, tmp_path, prompts=prompts, output=30)
    settings = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    with running_island(tmp_path / "model", ROOM | settings) as island:
        assert complete_all(island.address, prompts, max_tokens=30, **GREEDY) == due


@pytest.mark.gate("gptq-act-order")
@pytest.mark.parametrize("scheme", ["awq", "gptq-act-order"])
def test_a_packed_model_drafts_for_itself(scheme: str, tmp_path: Path) -> None:
    """Drafts hold, because both dequantize to the same numbers."""
    due = save(scheme, tmp_path)
    model = str(tmp_path / "model")
    drafts = {"speculation.method": "draft_model", "speculation.draft": model, "speculation.tokens": 3}
    with running_island(tmp_path / "model", ROOM | drafts | {"island.num_decode": 1}) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == due
        usage = complete(island.address, PROMPTS[1], max_tokens=OUTPUT, **GREEDY)[-1].usage
        assert usage is not None
        assert usage.accepted_tokens > 0
