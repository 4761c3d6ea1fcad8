"""Routing in Triton against torch's: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.choice import sort_by_expert
from tandem.workers.kernels.expert_blocks import expert_blocks
from tandem.workers.models.routing import Routing, route

pytest.importorskip("triton")

from tandem.workers.kernels.triton.routing import MAX_PAIRS, choose_experts, sort_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(tokens: int, num_experts: int) -> Tensor:
    return torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 128, 4), (9, 33, 3), (5, 5, 5)])
def test_tokens_go_to_the_experts_with_the_largest_scores(
    tokens: int, num_experts: int, top_k: int, normalize: bool
) -> None:
    logits = draw(tokens, 2 * num_experts)[:, :num_experts]
    routing = Routing(top_k, normalize, scale=2.5)
    expected_weights, expected = route(logits.cpu(), routing)
    for weights, experts in (
        choose_experts(logits, top_k, normalize=normalize, scale=2.5),
        route(logits, routing),  # which takes that kernel on a GPU
    ):
        assert torch.equal(experts.cpu(), expected)
        torch.testing.assert_close(weights.cpu(), expected_weights)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_experts_exist_even_where_logits_are_not_finite(value: float) -> None:
    logits = torch.full((2, 6), value, device=DEVICE)
    logits[1, :5] = 0.0
    weights, experts = choose_experts(logits, 4, normalize=True, scale=1.0)
    assert int(experts.min()) >= 0
    assert int(experts.max()) < 6
    assert bool(weights[0].isnan().all())
    if value < 0:
        assert weights[1].tolist() == [0.25] * 4
        assert experts[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [8, 16, 32])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 128, 4), (40, 33, 4), (70, 3, 2), (128, 40, 4)])
def test_pairs_are_sorted_into_the_same_blocks(tokens: int, num_experts: int, top_k: int, rows: int) -> None:
    """Also with a number for the experts of other ranks."""
    experts = draw(tokens, num_experts).argsort(1)[:, :top_k] if top_k < num_experts else draw(tokens, 3).argsort(1)
    assert experts.numel() <= MAX_PAIRS
    for known in (num_experts, num_experts + 1):
        expected = expert_blocks(experts.cpu(), known, rows)
        for blocks in (sort_pairs(experts, known, rows), sort_by_expert(experts, known, rows)):
            assert torch.equal(blocks.pairs.cpu(), expected.pairs)
            assert torch.equal(blocks.experts.cpu(), expected.experts)
            assert blocks.num_pairs == expected.num_pairs
