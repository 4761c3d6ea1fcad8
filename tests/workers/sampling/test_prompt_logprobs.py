"""Log-probabilities of prompt tokens: slices and messages cut them anywhere, and change nothing."""

import numpy as np
import pytest
import torch

from tandem.workers.sampling import prompt_logprobs
from tandem.workers.sampling.prompt_logprobs import PackedLogprobs, PromptLogprobs, logprobs_of_targets

VOCABULARY = 50


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("num_top", [0, 4, 60])
def test_slices_change_nothing_and_bound_the_logits(monkeypatch: pytest.MonkeyPatch, rows: int, num_top: int) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", rows * 4 * VOCABULARY + 3)
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 8), torch.randn(8, VOCABULARY)
    targets = torch.randint(0, VOCABULARY, (20,))
    largest = 0

    def logits_of(some: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(some))
        return some @ head

    chosen, ids, values = logprobs_of_targets(hidden, logits_of, targets, num_top, VOCABULARY)
    expected = (hidden @ head).log_softmax(-1)
    best = expected.topk(min(num_top, VOCABULARY), dim=-1)
    assert largest == min(rows, 20)
    torch.testing.assert_close(torch.from_numpy(chosen), expected.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(torch.from_numpy(values), best.values)
    assert ids.tolist() == best.indices.tolist()


def test_messages_are_bounded_and_in_order() -> None:
    delivered: list[PackedLogprobs] = []
    gatherer = PromptLogprobs(20, delivered.extend)
    chunks = [np.arange(begin, end, dtype=np.float32) for begin, end in ((0, 1), (1, 1), (1, 130), (130, 200))]
    for chunk in chunks:
        zeros = np.zeros((chunk.size, 20))
        gatherer.add(PackedLogprobs(chunk, zeros.astype(np.int32), zeros.astype(np.float32)))
    assert not delivered
    gatherer.deliver()
    assert np.concatenate([piece.logprobs for piece in delivered]).tolist() == list(range(200))
    assert all(0 < piece.logprobs.size * 21 <= prompt_logprobs.NUMBERS_A_PIECE for piece in delivered)
    assert all(piece.top_ids.shape == piece.top_logprobs.shape == (piece.logprobs.size, 20) for piece in delivered)
