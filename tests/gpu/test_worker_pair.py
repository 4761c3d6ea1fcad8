"""A prefill and a decode worker on two GPUs, in 16 bits, through gRPC: the KV that arrives is what was computed."""

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.checkpoints import make_model
from tests.gpu.pe_process import PeProcess, pe_processes
from tests.gpu.worker_pair import NUM_PAGES, PAGE, Pair, running_pair
from tests.gpu.worker_process import WorkerPe
from tests.oracle import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels
    pytest.mark.skipif(
        torch.cuda.device_count() < 2 or importlib.util.find_spec("nvshmem") is None,
        reason="needs two CUDA devices and nvshmem4py",
    ),
]

LAYERS = 3
PROMPT = random_prompt(6 * PAGE + 5, 0)
# dtype, head_dim, whether the decode worker's pages are mapped; the other way is by puts
ISLANDS = {
    "bf16-128-mapped": ("bfloat16", 128, True),
    "bf16-128-puts": ("bfloat16", 128, False),
    "bf16-64-mapped": ("bfloat16", 64, True),
    "fp16-128-mapped": ("float16", 128, True),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(2, WorkerPe) as started:
        yield started


@pytest.fixture(scope="module", params=ISLANDS.values(), ids=list(ISLANDS))
def island(
    request: pytest.FixtureRequest, processes: list[PeProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, int]]:
    """The workers, and the bytes of a token."""
    dtype, head_dim, mapped = request.param
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", head_dim=head_dim, num_hidden_layers=LAYERS).save_pretrained(folder)
    with running_pair(processes, folder, mapped, dtype=dtype) as pair:
        yield pair, LAYERS * 2 * 2 * head_dim * 2


def test_what_is_pushed_arrives_bit_for_bit(island: tuple[Pair, int]) -> None:
    """First token by token while it is computed, in chunks, then page to page from what the sender keeps."""
    pair, token_bytes = island
    for request_id, cached in (("computed", 0), ("cached", len(PROMPT) // PAGE * PAGE)):
        answer, slots = pair.push(request_id, PROMPT)
        assert answer.cached_tokens == cached
        assert answer.bytes_pushed == len(PROMPT) * token_bytes
        assert answer.push_seconds > 0
        arrived, computed = pair.decode.do("at_slots", slots), pair.prefill.do("of_prefix", PROMPT)
        assert len(arrived) == len(computed) == 2 * LAYERS
        for there, here in zip(arrived, computed, strict=True):
            assert here.any()
            assert np.array_equal(there[: len(here)], here)
            assert there[len(here) :].any()
        pair.abort(request_id)


@pytest.mark.parametrize("length", [PAGE + 4, 6 * PAGE + 5], ids=["all", "the first chunk"])
def test_what_was_computed_ahead_of_its_reservation_arrives(island: tuple[Pair, int], length: int) -> None:
    pair, token_bytes = island
    prompt = random_prompt(length, length)
    answer, slots = pair.push(f"announced {length}", prompt, announced=True)
    assert answer.bytes_pushed == length * token_bytes
    arrived, computed = pair.decode.do("at_slots", slots), pair.prefill.do("of_prefix", prompt)
    for there, here in zip(arrived, computed, strict=True):
        assert here.any()
        assert np.array_equal(there[: len(here)], here)
        assert there[len(here) :].any()
    pair.abort(f"announced {length}")


def test_the_decode_worker_goes_on_from_it(island: tuple[Pair, int]) -> None:
    """The same tokens twice, which the decode worker has from different pages each time."""
    pair, _ = island
    tokens = []
    for request_id in ("one", "two"):
        reservation = pair.prepare(request_id, PROMPT)
        pair.send(request_id, PROMPT, reservation)
        tokens.append(pair.start(request_id, reservation))
    assert len(tokens[0]) == 3
    assert tokens[0] == tokens[1]
    assert pair.status()[1].free_pages == NUM_PAGES
