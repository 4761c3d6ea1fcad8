"""Checks how the host and a captured step communicate through pinned memory, while earlier work is still under way."""

import time

import numpy as np
import pytest
import torch

from tandem.cache.kernels.fetched_staging import FetchedStaging
from tandem.cache.kernels.staging import FixedArrays
from tandem.workers.kernels.choice import choose_sampler
from tandem.workers.runner.step_inputs import NUM_SAMPLING, unpack_sampling
from tandem.workers.sampling.posted_samples import PostBox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cuda")
LONG = 200_000_000  # cycles: a tenth of a second
SIZES = [(3, torch.int64), (70_000, torch.int32)]


def test_the_host_does_not_write_over_what_is_still_to_be_fetched() -> None:
    staging = FetchedStaging(FixedArrays.num_bytes(SIZES), DEVICE)
    arrays = FixedArrays(staging, SIZES)
    staging.fetch(FixedArrays.num_bytes(SIZES))  # compiles it
    got = []
    for step in range(4):
        arrays.fill([np.arange(3) + step, np.arange(step, 70_000 - 20_000 * (step % 2), dtype=np.int32)])
        torch.cuda._sleep(LONG)
        staging.fetch(FixedArrays.num_bytes(SIZES))
        got.append([tensor.clone() for tensor in arrays.tensors])
    for step, (first, second) in enumerate(got):
        expected = np.arange(step, 70_000 - 20_000 * (step % 2))
        assert first.tolist() == [step, step + 1, step + 2]
        assert second[: expected.size].tolist() == expected.tolist()


def test_what_is_sent_first_is_not_zeroed() -> None:
    num_bytes = FixedArrays.num_bytes(SIZES)
    compiled = FetchedStaging(num_bytes, DEVICE)
    compiled.fetch(num_bytes)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    staging = FetchedStaging(num_bytes, DEVICE)
    arrays = FixedArrays(staging, SIZES)
    arrays.fill([np.arange(1, 4)])
    staging.fetch(num_bytes)
    assert arrays.tensors[0].tolist() == [1, 2, 3]


def test_what_is_filled_and_never_fetched_holds_nobody_up() -> None:
    arrays = FixedArrays(FetchedStaging(FixedArrays.num_bytes(SIZES), DEVICE), SIZES)
    torch.cuda._sleep(LONG)
    for step in range(3):
        arrays.fill([np.arange(3) + step])


def test_posts_are_seen_while_later_work_runs() -> None:
    rows, box, sampler = 5, PostBox(8, DEVICE), choose_sampler(8, DEVICE)
    logits, last = torch.eye(rows, 40, device=DEVICE), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    tickets, greedy = unpack_sampling(torch.zeros((NUM_SAMPLING, rows), dtype=torch.int64, device=DEVICE))
    sampler.sample(logits, greedy, last, tickets, box.words)  # compiles it
    torch.cuda.synchronize()
    for _ in range(3):
        ticket = box.next_ticket()
        tickets.fill_(ticket)
        torch.cuda._sleep(LONG)
        sampler.sample(logits, greedy, last, tickets, box.words)
        posted = box.expect(ticket, rows)
        assert not posted.is_done()
        torch.cuda._sleep(10 * LONG)
        event = torch.cuda.Event()
        event.record()
        assert posted.wait().token_ids.tolist() == list(range(rows))
        assert not event.query()  # nobody waited for what runs after
        while not event.query():
            time.sleep(0.001)
