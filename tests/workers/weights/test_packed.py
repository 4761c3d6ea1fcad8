"""Products with packed weights, and what is made of them, against matrices of numbers unpacked one by one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.workers.weights import packed
from tandem.workers.weights.packed import InGroups, Packed, PackedStack
from tests.support.packed_weights import naive_matrix, random_packed
from tests.support.tolerances import assert_close

CASES: dict[str, dict[str, Any]] = {
    "integers": {"group": 16},
    "zeros": {"group": 8, "zeros": True, "bias": True},
    "act-order": {"group": 16, "zeros": True, "act_order": True},
    "floats": {"group": 32, "is_float": True, "bias": True},
}


def draw(*shape: int, case: str) -> tuple[Any, ...]:
    drawn = random_packed(*shape, **CASES[case])
    return drawn.numbers, drawn.scales, drawn.zeros, drawn.groups, drawn.bias, torch.float32


def product(x: Tensor, weight: Packed) -> Tensor:
    y = x.double() @ naive_matrix(weight).T
    return y if weight.bias is None else y + weight.bias.double()


@pytest.mark.parametrize("case", CASES)
def test_a_weight_its_slices_and_its_matrix_multiply_alike(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows are dequantized in several blocks."""
    for module in ("kernels.torch", "weights"):
        monkeypatch.setattr(f"tandem.workers.{module}.packed.BLOCK_NUMBERS", 500)
    weight, x = Packed(*draw(24, 64, case=case)), torch.randn(5, 64)
    assert (weight.rows, weight.columns, weight.dtype) == (24, 64, torch.float32)
    assert torch.equal(weight.tensor(), naive_matrix(weight).float())
    assert_close(weight.prepare().linear(x), product(x, weight))
    assert_close(weight.slice(7, 20).linear(x), product(x, weight)[:, 7:20])
    assert torch.equal(weight.look_up(torch.tensor([3, 3, 0])), weight.tensor()[[3, 3, 0]])
    assert weight.plain() is None


@pytest.mark.parametrize("case", CASES)
def test_each_weight_of_a_stack_multiplies_its_own_rows(case: str) -> None:
    stack, x = PackedStack(*draw(3, 24, 64, case=case)), torch.randn(3, 5, 64)
    for index, y in enumerate(stack.prepare()(x)):
        one = stack.one(index)
        assert_close(y, x[index].double() @ naive_matrix(one).T)
        assert_close(one.linear(x[index]), product(x[index], one))


def test_columns_in_the_order_of_their_groups_multiply_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 10)
    weight, x = Packed(*draw(24, 64, case="act-order")), torch.randn(5, 64)
    ordered = InGroups(weight)
    assert ordered._weight.groups is None
    assert_close(ordered.linear(x), product(x, weight))


def test_groups_of_unlike_sizes_stay_where_they_are() -> None:
    weight, x = Packed(*draw(24, 64, case="act-order")), torch.randn(5, 64)
    assert weight.groups is not None
    weight.groups[0] = weight.groups[1]
    weight.groups[2] = weight.groups[1]
    assert_close(InGroups(weight).linear(x), product(x, weight))
