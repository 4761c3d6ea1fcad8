"""Words that stand for a step's tokens: what is read is a step's own, whole, and read before it is written over."""

import numpy as np
import pytest
import torch

from tandem.workers.kernels.torch.sampler import TorchSampler
from tandem.workers.runner.step_inputs import NUM_SAMPLING, unpack_sampling
from tandem.workers.sampling.posted_samples import TOKEN_BITS, PostBox, PostedSamples

_, GREEDY = unpack_sampling(torch.zeros((NUM_SAMPLING, 4), dtype=torch.int64))
TICKET = 5 << TOKEN_BITS


def posted(words: list[int], is_idle: bool = False) -> PostedSamples:
    return PostedSamples(np.array(words), TICKET, lambda: is_idle)


@pytest.mark.parametrize("missing", [0, 4 << TOKEN_BITS | 7, 6 << TOKEN_BITS | 7])
def test_a_step_is_done_when_all_its_words_are_there(missing: int) -> None:
    words = np.array([TICKET | 9, missing, TICKET])
    samples = PostedSamples(words, TICKET, lambda: False)
    assert not samples.is_done()
    words[1] = TICKET | (1 << TOKEN_BITS) - 1
    assert samples.is_done()
    words[:] = 0
    assert samples.wait().token_ids.tolist() == [9, (1 << TOKEN_BITS) - 1, 0]
    assert samples.wait().logprobs == [None] * 3


def test_words_that_come_while_the_device_is_asked_count() -> None:
    words = np.array([0])

    def finish() -> bool:
        words[0] = TICKET | 3
        return True

    assert PostedSamples(words, TICKET, finish).is_done()


def test_nobody_waits_for_what_cannot_come() -> None:
    with pytest.raises(RuntimeError, match="step 5 is done, but has not posted its tokens"):
        posted([TICKET, 0], is_idle=True).wait()
    with pytest.raises(TimeoutError, match=r"step 5 took more than 0.01 s"):
        PostedSamples(np.array([TICKET, 0]), TICKET, lambda: False, seconds=0.01).wait()


def test_what_the_device_reports_is_raised() -> None:
    def broken() -> bool:
        raise RuntimeError("no such address")

    with pytest.raises(RuntimeError, match="no such address"):
        PostedSamples(np.array([0]), TICKET, broken).is_done()


def test_a_half_is_read_before_it_is_posted_to_again() -> None:
    """Steps launched without anybody reading, of fewer and more rows; rows without a ticket post nothing."""
    box, sampler = PostBox(4, torch.device("cpu")), TorchSampler()
    samples, sizes = [], (4, 1, 3, 2, 4, 1)
    for step, count in enumerate(sizes):
        ticket = box.next_ticket()
        logits = torch.eye(10)[torch.arange(4) + step]
        tickets = torch.tensor([ticket] * count + [0] * (4 - count))
        sampler.sample(logits, GREEDY, torch.zeros(4, dtype=torch.int64), tickets, box.words)
        samples.append(box.expect(ticket, count))
    for step, count in enumerate(sizes):
        assert samples[step].wait().token_ids.tolist() == [step + row for row in range(count)]
