"""Routing and experts against sums over each token's experts, one by one; the kernels on a GPU, else interpreted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.plan.shard import Shard
from tandem.workers.kernels.expert_blocks import ExpertBlocks, expert_blocks
from tandem.workers.kernels.torch import layer as torch_layer
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.models.experts import GroupedExperts, LoopedExperts
from tandem.workers.models.parameters import MoeParameters
from tandem.workers.models.routing import GroupLimit, Routing, route
from tandem.workers.ranks.ranks import held_experts
from tandem.workers.weights.dense import Dense, DenseStack
from tandem.workers.weights.weight import WeightStack
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.workers.kernels.triton import grouped as triton_grouped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SILU_MUL = TorchLayerKernels().silu_mul


class TritonStack(DenseStack):
    """Interpreted on a CPU."""

    def grouped(self, x: Tensor, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
        return triton_grouped.grouped_linear(x, self, blocks, scale, fan_out)


@dataclass(frozen=True)
class Case:
    tokens: int = 7
    top_k: int = 2
    num_experts: int = 5
    hidden: int = 48
    intermediate: int = 40
    bias: bool = False
    transposed: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "one token": Case(tokens=1),
    "one expert": Case(num_experts=1, top_k=1),
    "all experts": Case(top_k=5),
    "several blocks of an expert": Case(tokens=60, num_experts=3, top_k=2),
    "several blocks of columns and depth": Case(hidden=160, intermediate=144),
    "bias": Case(bias=True),
    "transposed": Case(transposed=True),
    "bfloat16": Case(dtype=torch.bfloat16, bias=True),
    "float16": Case(dtype=torch.float16),
}


def draw(case: Case, stack: type[DenseStack] = DenseStack) -> tuple[Tensor, MoeParameters, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DEVICE, case.dtype)

    def experts(rows: int, columns: int) -> DenseStack:
        weight = normal(case.num_experts, rows, columns)
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if case.transposed else weight
        return stack(weight, normal(case.num_experts, rows) if case.bias else None)

    parameters = MoeParameters(
        router=Dense(normal(case.num_experts, case.hidden)),
        correction=None,
        shared=None,
        gate_up=experts(2 * case.intermediate, case.hidden),
        down=experts(case.hidden, case.intermediate),
    )
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(DEVICE, case.dtype)
    weights, chosen = route(parameters.router.linear(x), Routing(case.top_k, normalize=True))
    return x, parameters, weights, chosen


def expected(x: Tensor, parameters: MoeParameters, weights: Tensor, chosen: Tensor) -> Tensor:
    def linear(rows: Tensor, weights: WeightStack, expert: int) -> Tensor:
        return F.linear(rows, *(tensor.double() for tensor in weights.one(expert).tensors().values()))

    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (token_weights, experts) in enumerate(zip(weights.tolist(), chosen.tolist(), strict=True)):
        for weight, expert in zip(token_weights, experts, strict=True):
            gate, up = linear(x[token].double(), parameters.gate_up, expert).chunk(2)
            y[token] += weight * linear(F.silu(gate) * up, parameters.down, expert)
    return y


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("stack", [DenseStack, TritonStack], ids=["chosen", "triton"])
def test_grouped_experts(case: Case, stack: type[DenseStack]) -> None:
    if DEVICE == "cpu" and case.dtype == torch.bfloat16 and stack is TritonStack:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    x, parameters, weights, chosen = draw(case, stack)
    y = GroupedExperts(parameters, SILU_MUL)(x, weights, chosen)
    assert y.dtype == case.dtype
    assert_close(y, expected(x, parameters, weights, chosen))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("stack", [DenseStack, TritonStack], ids=["chosen", "triton"])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_add_up_what_their_own_experts_give(case: Case, stack: type[DenseStack], size: int) -> None:
    """Memory that no kernel writes holds NaN."""
    if DEVICE == "cpu" and case.dtype == torch.bfloat16 and stack is TritonStack:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    x, parameters, weights, chosen = draw(case, stack)
    total = torch.zeros(x.shape, dtype=torch.float32, device=DEVICE)
    for rank in range(min(size, case.num_experts)):
        held = Shard(rank, min(size, case.num_experts)).some("num_experts", case.num_experts)
        own = replace(parameters, gate_up=part_of(parameters.gate_up, held), down=part_of(parameters.down, held))
        with fill_with_nan():
            total += GroupedExperts(own, SILU_MUL, alone=False)(x, weights, held_experts(held)(chosen)).float()
    assert_close(total.to(case.dtype), expected(x, parameters, weights, chosen))


def part_of(stack: WeightStack, held: range) -> DenseStack:
    assert isinstance(stack, DenseStack)
    experts = slice(held.start, held.stop)
    return type(stack)(stack.weight[experts], None if stack.bias is None else stack.bias[experts])


@contextmanager
def fill_with_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(DEVICE != "cpu", reason="the loop serves CPUs")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_looped_experts(case: Case) -> None:
    x, parameters, weights, chosen = draw(case)
    with torch.inference_mode():
        y = LoopedExperts(parameters, SILU_MUL)(x, weights, chosen)
    assert y.dtype == case.dtype
    assert_close(y, expected(x, parameters, weights, chosen))


def test_rows_of_x_may_lie_apart() -> None:
    x, parameters, weights, chosen = draw(Case())
    wide = torch.full((7, 100), torch.nan, device=DEVICE)
    wide[:, :48] = x
    blocks = expert_blocks(chosen, 5, 16)
    assert isinstance(parameters.gate_up, DenseStack)
    arguments = (parameters.gate_up, blocks, weights.flatten(), 2)
    assert_close(triton_grouped.grouped_linear(wide[:, :48], *arguments), torch_layer.grouped_linear(x, *arguments))


@pytest.mark.parametrize("normalize", [False, True])
def test_route(normalize: bool) -> None:
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    weights, experts = route(logits.bfloat16(), Routing(3, normalize))
    assert weights.dtype == torch.float32
    for row, chosen, ours in zip(logits.bfloat16().double(), experts.tolist(), weights.tolist(), strict=True):
        assert chosen == sorted(range(6), key=lambda expert: -float(row[expert]))[:3]
        shares = row.exp() / row.exp().sum()
        total = float(shares[chosen].sum()) if normalize else 1.0
        assert ours == pytest.approx([float(shares[expert]) / total for expert in chosen], rel=1e-5)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, normalize=False, groups=GroupLimit(4, 2, counted=1), scale=16.0),
        Routing(3, normalize=True, scores="sigmoid", groups=GroupLimit(3, 2, counted=2), corrected=True, scale=2.5),
        Routing(2, normalize=True, scores="sigmoid", corrected=True),
    ],
    ids=["DeepSeek-V2", "DeepSeek-V3", "correction alone"],
)
def test_route_within_groups(routing: Routing) -> None:
    """The correction is large, so that it often decides."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 12, generator=generator)
    correction = torch.randn(12, generator=generator) if routing.corrected else None
    weights, experts = route(logits, routing, correction)
    for row, chosen, ours in zip(logits.double(), experts.tolist(), weights.tolist(), strict=True):
        scores = row.sigmoid() if routing.scores == "sigmoid" else row.softmax(0)
        ranks = (scores if correction is None else scores + correction).tolist()
        allowed = choosable(ranks, routing.groups)
        assert chosen == sorted(allowed, key=lambda expert: -ranks[expert])[: routing.top_k]
        total = float(scores[chosen].sum()) if routing.normalize else 1.0
        assert ours == pytest.approx([float(scores[expert]) / total * routing.scale for expert in chosen], rel=1e-5)


def test_scores_that_are_all_zero_give_no_nan() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), Routing(2, normalize=True, scores="sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


def choosable(ranks: list[float], limit: GroupLimit | None) -> list[int]:
    if limit is None:
        return list(range(len(ranks)))
    size = len(ranks) // limit.num_groups
    groups = [range(begin, begin + size) for begin in range(0, len(ranks), size)]
    groups.sort(key=lambda group: -sum(sorted(ranks[expert] for expert in group)[-limit.counted :]))
    return [expert for group in groups[: limit.kept] for expert in group]
