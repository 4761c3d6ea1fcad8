"""Workers on GPUs that push pages over NIXL, as between hosts: UCX maps no peer's memory, but writes over TCP."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.pe_process import PeProcess, pe_processes
from tests.gpu.test_families import check_logprobs, running_workers
from tests.gpu.worker_process import WorkerPe
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.client_requests import GREEDY, complete_all, complete_all_updates
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("nixl") is None, reason="needs a CUDA device and nixl"
    ),
]
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 16, 47, 49, 149))]
OUTPUT = 24
SETTINGS = {"island.transport": "nixl"}  # digests of what was pushed are compared: island.verify_kv


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(2, WorkerPe) as started:
        yield started


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_tokens_equal_transformers_in_float32(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    due = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    with running_workers(processes, tmp_path, "float32", settings=SETTINGS) as address:
        assert len({process.do("gpu") for process in processes}) == min(2, torch.cuda.device_count())
        assert complete_all(address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == due
        assert complete_all(address, PROMPTS[:2], max_tokens=OUTPUT, **GREEDY) == due[:2]


def test_logprobs_in_bfloat16(processes: list[PeProcess], tmp_path: Path) -> None:
    """They are as near to float32's as those of transformers; steps are CUDA graphs."""
    make_model("llama", **sizes_on_gpu("llama")).save_pretrained(tmp_path)
    with running_workers(processes, tmp_path, "bfloat16", settings=SETTINGS) as address:
        answers = complete_all_updates(address, PROMPTS, max_tokens=OUTPUT, logprobs=5, **GREEDY)
    check_logprobs(tmp_path, PROMPTS, answers)
