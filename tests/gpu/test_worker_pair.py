"""A prefill and a decode worker on GPUs, through gRPC: the KV that arrives is what was computed."""

from collections.abc import Iterator

import pytest

from tests.gpu.pair_cases import (
    CASES,
    check_announced,
    check_long,
    check_push,
    check_push_of_many,
    tokens_after,
)
from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, pe_processes
from tests.gpu.worker_pair import NUM_PAGES, Pair, running_pair
from tests.gpu.worker_process import WorkerPe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels
    NEEDS_NVSHMEM,
]

# Whether the decode worker's pages are mapped; the other way is by puts.
ISLANDS = {
    "bf16-128-mapped": (CASES["bf16-128"], True),
    "bf16-128-puts": (CASES["bf16-128"], False),
    "bf16-128-long-runs-mapped": (CASES["bf16-128-long-runs"], True),
    "bf16-64-mapped": (CASES["bf16-64"], True),
    "fp16-128-mapped": (CASES["fp16-128"], True),
    "fp8-128-mapped": (CASES["fp8-128"], True),
    "fp8-128-puts": (CASES["fp8-128"], False),
    "latents-mapped": (CASES["latents"], True),
    "latents-puts": (CASES["latents"], False),
    "fp8-latents-mapped": (CASES["fp8-latents"], True),
    "fp8-latents-puts": (CASES["fp8-latents"], False),
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
    case, mapped = request.param
    model = case.save(tmp_path_factory.mktemp("model"))
    with running_pair(processes, model, mapped, **case.settings) as pair:
        yield pair, case.token_bytes


def test_what_is_pushed_arrives_bit_for_bit(island: tuple[Pair, int]) -> None:
    check_push(*island)


def test_what_is_pushed_of_many_arrives_bit_for_bit(island: tuple[Pair, int]) -> None:
    check_push_of_many(*island)


def test_what_was_computed_ahead_of_its_reservation_arrives(island: tuple[Pair, int]) -> None:
    check_announced(*island)


def test_long_prompts_arrive_bit_for_bit(island: tuple[Pair, int]) -> None:
    check_long(*island)


def test_the_decode_worker_goes_on_from_it(island: tuple[Pair, int]) -> None:
    """The same tokens twice, which the decode worker has from different pages each time."""
    pair, _ = island
    assert tokens_after(pair, "one") == tokens_after(pair, "two")
    assert pair.status()[1].free_pages == NUM_PAGES
