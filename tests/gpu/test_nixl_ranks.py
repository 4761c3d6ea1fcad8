"""Workers of several ranks on GPUs that push over NIXL, as between hosts. The ranks of a worker meet in memory of their
own, which they map by handles of CUDA's. They may share a GPU, and then take turns there."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.pe_process import PeProcess, pe_processes, together
from tests.gpu.rank_process import PeWithoutMapping, Shape, bits, meeting, sum_of
from tests.gpu.test_families import check_logprobs, running_workers
from tests.gpu.test_rank_workers import shape_of
from tests.gpu.worker_process import WorkerPe
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEEDS_NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 16, 47, 49, 149))]
OUTPUT = 12
SLOT = 64 << 10  # bytes, so that the largest sums take several launches
SHAPES: list[Shape] = [(1, 1), (3, 7), (1, 4096), (64, 2048), (700, 1024)]
IN_FLOAT32 = {
    "llama-1+2": ("llama", 1, 2),
    "qwen3_moe-2+1": ("qwen3_moe", 2, 1),
    "gemma3-2+2": ("gemma3", 2, 2),
    "deepseek_v3-2+1": ("deepseek_v3", 2, 1),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(4, WorkerPe) as started:
        yield started


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_sum_in_memory_of_their_own(size: int) -> None:
    """Eagerly, and in a graph that is replayed."""
    with pe_processes(size, PeWithoutMapping) as ranks, meeting(ranks, SLOT):
        for dtype in (torch.float32, torch.bfloat16):
            for one in together(ranks, "sums", SHAPES, dtype):
                for seed, shape in enumerate(SHAPES):
                    np.testing.assert_array_equal(one[seed], bits(sum_of(size, seed, shape, dtype)))
        for one in together(ranks, "replays", (5, 1023), torch.bfloat16, 20):
            for seed, found in enumerate(one):
                np.testing.assert_array_equal(found, bits(sum_of(size, seed, (5, 1023), torch.bfloat16)))


@NEEDS_NIXL
@pytest.mark.parametrize("case", IN_FLOAT32)
def test_tokens_equal_transformers_in_float32(case: str, processes: list[PeProcess], tmp_path: Path) -> None:
    family, prefill, decode = IN_FLOAT32[case]
    make_model(family).save_pretrained(tmp_path)
    due = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    settings = shape_of(prefill, decode) | {"island.transport": "nixl"}
    with running_workers(processes, tmp_path, "float32", settings=settings) as address:
        assert complete_all(address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == due
        assert complete_all(address, PROMPTS[:2], max_tokens=OUTPUT, **GREEDY) == due[:2]


@NEEDS_NIXL
def test_logprobs_in_bfloat16(processes: list[PeProcess], tmp_path: Path) -> None:
    """They are as near to float32's as those of transformers; steps are CUDA graphs."""
    make_model("llama", **sizes_on_gpu("llama")).save_pretrained(tmp_path)
    settings = shape_of(2, 2) | {"island.transport": "nixl"}
    with running_workers(processes, tmp_path, "bfloat16", settings=settings) as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, logprobs=5, **GREEDY)
    check_logprobs(tmp_path, PROMPTS, answers)
