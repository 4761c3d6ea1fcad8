"""Every family through the gRPC door: a prefill and a decode worker in processes of their own, KV pushed by NVSHMEM."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandem.cluster.config import load_config
from tandem.cluster.process_settings import worker_configs
from tests.checkpoints import COMMON, FAMILIES, make_model
from tests.gpu.pe_process import PeProcess, pe_processes, together
from tests.gpu.worker_pair import each, form
from tests.gpu.worker_process import WorkerPe
from tests.island import running_gateway
from tests.oracle import greedy_all, load_oracle, random_prompt
from tests.requests import GREEDY, complete_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("nvshmem") is None,
        reason="needs a CUDA device and nvshmem4py",
    ),
]
CHUNK, PAGE, NUM_PAGES = 48, 16, 256
# One token; around a page, around a chunk, several chunks and windows.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS * 2)]
OUTPUT = 56  # more than two windows


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    """They stay for all families: imports take longer than an island."""
    with pe_processes(2, WorkerPe) as started:
        yield started


@contextmanager
def running_workers(processes: list[PeProcess], model: Path, dtype: str) -> Iterator[str]:
    """An island of the processes; where its gateway listens. Free pages are full of NaN."""
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
    config = load_config(None, overrides)
    workers = worker_configs(config, COMMON["max_position_embeddings"])
    each(processes, "load", workers, True)
    try:
        addresses = form(processes, NUM_PAGES)
        together(processes, "poison")
        with running_gateway(config, NUM_PAGES, workers, addresses) as (address, _):
            yield address
    finally:
        together(processes, "stop")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers_in_float32(family: str, processes: list[PeProcess], tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    expected = greedy_all(load_oracle(tmp_path, device="cuda"), PROMPTS, OUTPUT)
    with running_workers(processes, tmp_path, "float32") as address:
        assert complete_all(address, PROMPTS, max_tokens=OUTPUT, **GREEDY) == expected
