"""Tokens through the gRPC server with latents and index keys in 8 bits, against transformers that rounds alike."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cache.plan.kv_scales import FP8
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.transfer.errors import MembershipRefused
from tandem.workers.worker import Worker
from tests.e2e.test_prompt_logprobs import entries_of, values_of
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all
from tests.support.draft_heads import save_mtp
from tests.support.drafters import SPECULATING, KnownDrafter, drafting
from tests.support.island import running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, load_oracle, random_prompt

CHUNK, OUTPUT = 48, 12
LENGTHS = (1, 9, CHUNK + 1, 2 * CHUNK + 5)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
STORED: dict[str, Any] = {"cache.kv_cache_dtype": "fp8_e4m3", "scheduler.max_batch_tokens": CHUNK}
SETTINGS: dict[str, dict[str, Any]] = {
    f"{prefill}+{decode}": {"island.prefill_ranks": prefill, "island.decode_ranks": decode}
    for prefill, decode in ((1, 1), (2, 2), (1, 2))
}
SETTINGS["over TCP"] = {"island.transport": "tcp"}


def rounded_tokens(folder: Path) -> list[list[int]]:
    """Returns the tokens of transformers with rounded latents and index keys, which differ from those without
    rounding."""
    from tests.support.rounding_cache import RoundingKeys, round_latents

    model = load_oracle(folder)
    exact = [greedy(model, prompt, OUTPUT) for prompt in PROMPTS]
    round_latents(model)
    rounded = [greedy(model, prompt, OUTPUT, RoundingKeys(config=model.config)) for prompt in PROMPTS]
    assert rounded != exact, "rounding decides nothing here"
    return rounded


@pytest.mark.gate("deepseek_v2-1+1", "deepseek_v3-2+2", "deepseek_v32-over TCP")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"])
def test_chunks_and_prefixes(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    expected = rounded_tokens(folder)
    with running_island(folder, {**STORED, **settings, "island.verify_kv": True}) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected
        # Once more, with prefixes that are there already: they go page to page.
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected
        assert all(pool.dtype == FP8 for worker in island.workers for pool in worker.pools)
        with island.client() as client:
            model_info = client.model_info()
        timings = complete(island.address, random_prompt(5, 99), max_tokens=2, **GREEDY)[-1].timings
        assert timings is not None
        assert model_info.kv_bytes_per_token == timings.bytes_pushed // 5


@pytest.mark.gate("deepseek_v3-*")
@pytest.mark.parametrize(("case", "far"), [("deepseek_v2", 0.1), ("deepseek_v3", 0.1), ("deepseek_v32", 0.4)])
def test_logits_are_near_those_of_float32(case: str, far: float, tmp_path: Path) -> None:
    """Log-probabilities of a prompt in three chunks equal those of rounded latents, and are not far from exact ones.
    Random index keys choose some other positions."""
    from tests.support.rounding_cache import RoundingKeys, round_latents

    folder, prompt = save_checkpoint(case, tmp_path), PROMPTS[-1]
    model = load_oracle(folder)
    exact = values_of(model, prompt)
    round_latents(model)
    rounded = values_of(model, prompt, RoundingKeys(config=model.config))
    with running_island(folder, STORED) as island:
        entries = entries_of(complete(island.address, prompt, max_tokens=1, prompt_logprobs=1, **GREEDY))
    found = torch.tensor([entry.logprob for entry in entries[1:] if entry is not None])
    rows = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
    assert (found - rounded[rows]).abs().max() < 1e-3
    assert 1e-3 < (found - exact[rows]).abs().mean() < far


@pytest.mark.gate("deepseek_v3", "deepseek_v32")
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v32"])
def test_drafts_and_moves(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts are verified against rounded entries; requests move while they are decoded."""
    move_back_and_forth(2, monkeypatch)
    folder = save_checkpoint(case, tmp_path)
    expected = rounded_tokens(folder)
    drafter = KnownDrafter(PROMPTS, expected, right=0.7)
    settings = {**STORED, **SPECULATING, "scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02}
    with drafting(drafter), running_island(folder, settings) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected
        counters = [worker._loop.counters for worker in island.workers]  # type: ignore[union-attr]
        accepted = sum(one.accepted_tokens for one in counters)
        drafted = sum(one.drafted_tokens for one in counters)
        assert 0 < accepted < drafted


def test_a_layer_of_the_checkpoint_drafts(tmp_path: Path) -> None:
    """Its latents are stored in the model's group, in 8 bits, too."""
    folder = save_mtp(tmp_path / "model")
    expected = rounded_tokens(folder)
    settings = {**STORED, "speculation.method": "mtp", "speculation.tokens": 4}
    with running_island(folder, settings) as island:
        assert complete_all(island.address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected
        assert sum(worker._loop.counters.drafted_tokens for worker in island.workers) > 0  # type: ignore[union-attr]


def test_workers_that_store_latents_otherwise_form_no_island(tmp_path: Path) -> None:
    folder = save_checkpoint("deepseek_v2", tmp_path)
    config = load_config(None, {"model.path": str(folder), "cache.kv_cache_dtype": "fp8_e4m3"})
    first, second = worker_configs(config, max_model_len=64)
    workers = [Worker(first), Worker(replace(second, kv_cache_dtype="auto"))]
    handles = [worker.open(8) for worker in workers]
    for worker in workers:
        with pytest.raises(MembershipRefused, match="kv_cache_dtype"):
            worker.join(handles)
        worker.stop()
