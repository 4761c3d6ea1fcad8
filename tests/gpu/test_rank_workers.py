"""Workers of several ranks on GPUs, through the gRPC server. They may share a GPU, and then take turns there."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, pe_processes, together
from tests.gpu.test_families import accepted_in, check_logprobs, running_workers
from tests.gpu.worker_process import WorkerPe
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates, tokens_of
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), NEEDS_NVSHMEM]
# One token; a page, around a chunk, several chunks and windows.
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 16, 47, 49, 149))]
OUTPUT = 12
WAIT_SECONDS = 10.0
# Families by what they have: plain; experts; latents and experts; windows; experts, biases and sinks; recurrent states,
# of heads by key head and by part.
IN_FLOAT32 = {
    "llama-1+2": ("llama", 1, 2),
    "qwen3_moe-2+1": ("qwen3_moe", 2, 1),
    "deepseek_v3-2+2": ("deepseek_v3", 2, 2),
    "gemma3-2+1": ("gemma3", 2, 1),
    "gpt_oss-1+2": ("gpt_oss", 1, 2),
    "qwen3_next-1+2": ("qwen3_next", 1, 2),
    "qwen3_5-2+1": ("qwen3_5", 2, 1),
}
# By Triton's attention (heads of 96) and FlashInfer's, in CUDA graphs; latents.
IN_BFLOAT16: dict[str, tuple[str, dict[str, int], int, int]] = {
    "llama-96-2+2": ("llama", {"head_dim": 96, "hidden_size": 256}, 2, 2),
    "qwen3_moe-96-1+2": ("qwen3_moe", {"head_dim": 96, "hidden_size": 256}, 1, 2),
    "llama-64-2+1": ("llama", sizes_on_gpu("llama"), 2, 1),
    "deepseek_v2-1+2": ("deepseek_v2", sizes_on_gpu("deepseek_v2"), 1, 2),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(4, WorkerPe) as started:
        yield started


def shape_of(prefill: int, decode: int) -> dict[str, Any]:
    """Four processes in all: there are two workers of the smaller side."""
    ranks = {"island.prefill_ranks": prefill, "island.decode_ranks": decode, "island.verify_kv": False}
    workers = {"island.num_prefill": 1 + (prefill < decode), "island.num_decode": 1 + (decode < prefill)}
    return {**ranks, **workers, "scheduler.max_sequences": 8}


@pytest.mark.parametrize("case", IN_FLOAT32)
def test_tokens_equal_transformers_in_float32(case: str, processes: list[PeProcess], tmp_path: Path) -> None:
    family, prefill, decode = IN_FLOAT32[case]
    make_model(family).save_pretrained(tmp_path)
    due = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    with running_workers(processes, tmp_path, "float32", settings=shape_of(prefill, decode)) as address:
        assert complete_all(address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == due
        assert complete_all(address, PROMPTS[:2], max_tokens=OUTPUT, **GREEDY) == due[:2]


@pytest.mark.parametrize("case", IN_BFLOAT16)
def test_logprobs_in_bfloat16(case: str, processes: list[PeProcess], tmp_path: Path) -> None:
    """They are as near to float32's as those of transformers."""
    family, fields, prefill, decode = IN_BFLOAT16[case]
    make_model(family, **fields).save_pretrained(tmp_path)
    with running_workers(processes, tmp_path, "bfloat16", settings=shape_of(prefill, decode)) as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, logprobs=5, **GREEDY)
    check_logprobs(tmp_path, PROMPTS, answers)


def test_drafts_and_joint_steps_in_graphs(processes: list[PeProcess], tmp_path: Path) -> None:
    """Workers that have any role capture all graphs. With tied embeddings a small model repeats itself."""
    sizes = {"head_dim": 96, "hidden_size": 256, "tie_word_embeddings": True}
    make_model("llama", **sizes).save_pretrained(tmp_path)
    settings = {**shape_of(2, 2), "scheduler.roles": "adaptive", "scheduler.token_seconds": 0.5}
    with running_workers(processes, tmp_path, "bfloat16", "ngram", settings) as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=4 * OUTPUT, logprobs=5, **GREEDY)
    assert accepted_in(answers) > 0
    check_logprobs(tmp_path, PROMPTS, answers)


@pytest.mark.parametrize(
    ("prefill", "decode", "verify"),
    [(1, 2, False), (2, 1, False), (2, 2, False), (1, 2, True)],
    ids=["1+2", "2+1", "2+2", "1+2-digests"],
)
def test_each_rank_has_its_heads_of_the_states(
    prefill: int, decode: int, verify: bool, processes: list[PeProcess], tmp_path: Path
) -> None:
    """Prefixes end at snapshots, and few drafts in graphs are accepted. verify: digests of pushed KV, which all
    ranks add up, are compared. With tied embeddings a small model repeats itself."""
    make_model("qwen3_next", tie_word_embeddings=True).save_pretrained(tmp_path)
    oracle, longest = load_oracle(tmp_path, device="cuda"), PROMPTS[-1]
    prompts = [*PROMPTS, longest[:100] + PROMPTS[2], longest]
    due = greedy_all(oracle, prompts, 4 * OUTPUT)
    snapshots = {"cache.state_interval": 32, "cache.state_share": 1.0}
    settings = {**shape_of(prefill, decode), **snapshots, "island.verify_kv": verify}
    with running_workers(processes, tmp_path, "float32", "ngram", settings) as address, Client(address) as client:
        answers = complete_all_updates(address, prompts[:5], max_tokens=4 * OUTPUT, **GREEDY)
        behind = [complete_all_updates(address, [one], max_tokens=4 * OUTPUT, **GREEDY)[0] for one in prompts[5:]]
        (island,) = client.cluster_info().islands
    assert [tokens_of(updates) for updates in (*answers, *behind)] == due
    assert [updates[-1].usage.cached_tokens for updates in behind if updates[-1].usage] == [96, 144]
    assert sum(worker.counters.drafted_tokens for worker in island.workers) > 0
    assert not any(worker.counters.corrupt for worker in island.workers)


def test_a_killed_rank_ends_its_worker(tmp_path: Path) -> None:
    """The other rank waits for the killed one on the device. The worker ends with a typed error, in bounded time, and
    without another token."""
    make_model("llama").save_pretrained(tmp_path)
    lost, settings = "", {**shape_of(1, 2), "island.num_prefill": 1}
    with pe_processes(3, WorkerPe) as processes:
        together(processes, "hurry", WAIT_SECONDS)
        with (
            suppress(OSError),  # the killed one does not stop when it is asked to
            running_workers(processes, tmp_path, "float32", settings=settings) as address,
            Client(address) as client,
        ):
            updates = client.generate(PROMPTS[2], max_tokens=150, **GREEDY)
            next(updates)
            processes[2]._process.kill()
            until(lambda: processes[1].do("lost") != "", 4 * WAIT_SECONDS)
            lost = processes[1].do("lost")
        for process in processes:
            process._process.kill()
    assert lost == "rank 0 waited for the others in vain"
