"""Merged parts against attention to all of their keys at once: on a GPU, else in Triton's interpreter."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tandem.cache.kernels.triton.merge import merge_parts
from tests.support.tolerances import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = 5


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """o and the log-sum-exp of base 2 of scores [H, n] and values [H, n, D]."""
    return (scores.softmax(-1).unsqueeze(1) @ values).squeeze(1), scores.logsumexp(-1) / math.log(2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "with_sinks"), [(4, 16, False), (12, 24, True), (1, 64, True)])
def test_parts_make_the_whole(dtype: torch.dtype, heads: int, head_dim: int, with_sinks: bool) -> None:
    """Rows have none, one, two and three shared parts. Some parts outweigh the others by far."""
    generator = torch.Generator().manual_seed(heads)
    parts_of = [[], [4], [0, 2], [5, 1, 3]]  # of each row, among the shared ones
    shared = sum(map(len, parts_of))
    scores = torch.randn(4 + shared, heads, KEYS, generator=generator).double() * 9
    values = torch.randn(4 + shared, heads, KEYS, head_dim, generator=generator).double()
    outputs, lses = zip(*(attend(s, v) for s, v in zip(scores, values, strict=True)), strict=True)
    sinks = torch.randn(heads, generator=generator) * 9 if with_sinks else None
    expected = []
    for row, parts in enumerate(parts_of):
        chosen = [row, *(4 + part for part in parts)]
        weights = torch.cat([scores[part] for part in chosen], -1)
        if sinks is not None:
            weights = torch.cat((weights, sinks.double().unsqueeze(-1)), -1)
        weights = weights.softmax(-1)[:, : KEYS * len(chosen)]
        expected.append((weights.unsqueeze(1) @ torch.cat([values[part] for part in chosen], 1)).squeeze(1))
    own, of_shared = torch.stack(outputs).to(DEVICE, dtype).split((4, shared))
    own_lse, shared_lse = torch.stack(lses).to(DEVICE, torch.float32).split((4, shared))
    own = own.clone()
    begins = torch.tensor([0, 0, 1, 3, 6], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([place for parts in parts_of for place in parts], dtype=torch.int32, device=DEVICE)
    merge_parts((own, own_lse), (of_shared, shared_lse), begins, places, None if sinks is None else sinks.to(DEVICE))
    assert_close(own.cpu(), torch.stack(expected))
