"""Leases and recalls between workers on GPUs: pages are taken back without a gateway, by one-sided writes."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.gpu.pe_process import NEEDS_NVSHMEM, pe_processes
from tests.gpu.worker_pair import MAX_TOKENS, NUM_PAGES, PAGE, Pair, running_pair
from tests.gpu.worker_process import WorkerPe
from tests.support.checkpoints import make_model
from tests.support.oracle import greedy, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    NEEDS_NVSHMEM,
]

LEASE_SECONDS = 3.0
PROMPT = random_prompt(6 * PAGE + 5, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leases") / "model"
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["mapped", "puts"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[Pair]:
    with (
        pe_processes(2, WorkerPe) as processes,
        running_pair(
            processes, model, request.param, dtype="float32", lease_seconds=LEASE_SECONDS, verify_kv=True
        ) as pair,
    ):
        yield pair


def wait_until_free(pair: Pair) -> None:
    deadline = time.monotonic() + 20
    while (decode := pair.status()[1]).free_pages < NUM_PAGES or decode.draining_pages:
        assert time.monotonic() < deadline, decode
        time.sleep(0.05)


def test_a_reservation_nobody_uses_is_recalled(pair: Pair, model: Path) -> None:
    """The writer answers the recall, and refuses the reservation from then on; the next use of the pages is right."""
    before = pair.status()
    abandoned = pair.prepare("abandoned", PROMPT)
    assert pair.status()[1].free_pages < NUM_PAGES
    wait_until_free(pair)
    after = pair.status()
    assert after[1].counters.expired_leases - before[1].counters.expired_leases == 1
    assert [now.counters.recalled - then.counters.recalled for now, then in zip(after, before, strict=True)] == [1, 1]
    with pytest.raises(grpc.RpcError) as refused:
        pair.send("abandoned", PROMPT, abandoned)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    again = pair.prepare("again", PROMPT)
    first = pair.send("again", PROMPT, again).first_token
    assert [first, *pair.start("again", again)] == greedy(load_oracle(model), PROMPT, MAX_TOKENS)
    wait_until_free(pair)


def test_pages_that_were_pushed_return_without_a_recall(pair: Pair) -> None:
    """All landed, but nobody started it: the signal says that the writer is quiet."""
    before = pair.status()
    reservation = pair.prepare("landed", PROMPT)
    pair.send("landed", PROMPT, reservation)
    wait_until_free(pair)
    after = pair.status()
    assert after[1].counters.expired_leases - before[1].counters.expired_leases == 1
    assert after[1].counters.recalled == before[1].counters.recalled
    assert after[1].counters.corrupt == 0
