"""Every family through the gRPC server: prefill and decode in processes of their own, KV pushed by NVSHMEM."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cluster.client.client_messages import GenerateUpdate
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.process_settings import worker_configs
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, pe_processes, together
from tests.gpu.worker_pair import each, form
from tests.gpu.worker_process import WorkerPe
from tests.support.checkpoints import COMMON, FAMILIES, KEEP_STATES, make_model, sizes_on_gpu
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates, tokens_of
from tests.support.island import running_gateway
from tests.support.oracle import greedy_all, in_its_precision, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels
    NEEDS_NVSHMEM,
]
CHUNK, PAGE, NUM_PAGES = 48, 16, 256
# One token; a page, around a chunk, several chunks and windows.
LENGTHS = (1, PAGE, CHUNK - 1, CHUNK + 1, 3 * CHUNK + 5)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS * 3)]
OUTPUT = 56  # more than two windows
ERROR_RATIO = 1.5  # as in test_models


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    """They stay for all families: imports take longer than an island."""
    with pe_processes(2, WorkerPe) as started:
        yield started


@contextmanager
def running_workers(
    processes: list[PeProcess],
    model: Path,
    dtype: str,
    speculation: str = "none",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[str]:
    """An island of the processes; where its gateway listens. Free pages are full of NaN. settings: more of the
    cluster's."""
    overrides = {
        "model.path": str(model),
        "model.dtype": dtype,
        "cache.page_size": PAGE,
        "cache.num_pages": NUM_PAGES,
        "scheduler.max_batch_tokens": CHUNK,
        "scheduler.max_sequences": len(PROMPTS),
        "island.device": "cuda",
        "island.transport": "nvshmem",
        "island.verify_kv": True,
        "gateway.port": 0,
    }
    if speculation != "none":
        overrides |= {"speculation.method": speculation, "speculation.max_step_tokens": 4 * len(PROMPTS)}
    config = load_config(None, {**overrides, **settings})
    workers = worker_configs(config, COMMON["max_position_embeddings"])
    each(processes, "load", workers, True)
    try:
        addresses = form(processes, NUM_PAGES)
        together(processes, "poison")
        with running_gateway(config, NUM_PAGES, workers, addresses) as (address, _):
            yield address
    finally:
        together(processes, "stop")


DRAFTED = ["qwen3", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4", "llama4", "qwen3_next", "qwen3_5"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_float32(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    expected = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    with running_workers(processes, tmp_path, "float32") as address:
        assert complete_all(address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected


@pytest.mark.parametrize("family", KEEP_STATES)
def test_prompts_go_on_from_snapshots_of_states(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    """Each 32 positions, and at the last full page of a prompt."""
    make_model(family).save_pretrained(tmp_path)
    oracle, prompt = load_oracle(tmp_path, device="cuda"), random_prompt(150, 1)
    (output,) = greedy_all(oracle, [prompt], OUTPUT)
    turn = prompt + output + PROMPTS[1]
    asked = [(prompt, 0), (prompt, 144), (prompt[:100] + PROMPTS[3], 96), (turn, 144), (turn, 208)]
    expected = greedy_all(oracle, [one for one, _ in asked], 24)  # a turn leaves room for so many
    settings = {"cache.state_interval": 32, "cache.state_share": 1.0}
    with running_workers(processes, tmp_path, "float32", settings=settings) as address:
        for (one, cached), wanted in zip(asked, expected, strict=True):
            (updates,) = complete_all_updates(address, [one], max_tokens=len(wanted), **GREEDY)
            assert tokens_of(updates) == wanted
            usage = updates[-1].usage
            assert usage is not None
            assert usage.cached_tokens == cached


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    family: str, processes: list[PeProcess], tmp_path: Path
) -> None:
    """Along the tokens that come; by FlashInfer's kernels, and CUDA graphs where the family has them."""
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    with running_workers(processes, tmp_path, "bfloat16") as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, logprobs=5, **GREEDY)
    check_logprobs(tmp_path, PROMPTS, answers)
    assert len([entry for updates in answers for entry in entries_of(updates)]) == len(PROMPTS) * OUTPUT * 6


@pytest.mark.parametrize("family", DRAFTED)
def test_drafts_change_no_token_in_float32(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    """Small models repeat themselves, so that drafts by prompt lookup hold, but for those that keep states: theirs are
    mostly rejected, and go back to the states before."""
    make_model(family).save_pretrained(tmp_path)
    expected = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    with running_workers(processes, tmp_path, "float32", "ngram") as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, **GREEDY)
    assert [tokens_of(updates) for updates in answers] == expected
    check_drafts(family, answers)


@pytest.mark.parametrize("family", DRAFTED)
def test_logprobs_of_verified_drafts_in_bfloat16(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    """Verify steps are CUDA graphs of FlashInfer's kernels, where the family has them."""
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    with running_workers(processes, tmp_path, "bfloat16", "ngram") as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, logprobs=5, **GREEDY)
    check_drafts(family, answers)
    check_logprobs(tmp_path, PROMPTS, answers)


def check_logprobs(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[GenerateUpdate]]) -> None:
    """Checks that the log-probabilities in bfloat16 are as near to float32 as those of transformers."""
    exact, theirs = (logprobs_of(folder, dtype, prompts, answers) for dtype in (torch.float32, torch.bfloat16))
    ours = np.array([logprob for updates in answers for _, _, logprob in entries_of(updates)])
    assert np.median(np.abs(ours - exact)) < ERROR_RATIO * np.median(np.abs(theirs - exact))


def check_drafts(family: str, answers: Sequence[Sequence[GenerateUpdate]]) -> None:
    assert sum(usage.drafted_tokens for updates in answers if (usage := updates[-1].usage)) > 0
    assert accepted_in(answers) > 0 or family in KEEP_STATES


def accepted_in(answers: Sequence[Sequence[GenerateUpdate]]) -> int:
    """Drafted tokens that held."""
    return sum(usage.accepted_tokens for updates in answers if (usage := updates[-1].usage))


def entries_of(updates: Sequence[GenerateUpdate]) -> Iterator[tuple[int, int, float]]:
    """The place of each token among those that came, and it and the best ones with their log-probabilities."""
    entries = [entry for update in updates for entry in update.logprobs]
    for place, entry in enumerate(entries):
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            yield place, token, logprob


@torch.inference_mode()
def logprobs_of(
    folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[GenerateUpdate]]
) -> np.ndarray:
    """Returns transformers' log-probabilities for all entries of the answers, in their order."""
    model = load_oracle(folder, dtype, "cuda")
    found: list[float] = []
    for prompt, updates in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *tokens_of(updates)]], device="cuda")
        with in_its_precision(model):
            logits = model(ids).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
        found += [float(logprobs[place, token]) for place, token, _ in entries_of(updates)]
    return np.array(found)
