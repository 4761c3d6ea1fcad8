"""Products with dense weights against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from tandem.workers.kernels.choice import native_layer_kernels
from tandem.workers.weights.dense import Dense, DenseStack


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 13, 97, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (1, 1), (40, 200), (2100, 35)])
def test_equals_linear(rows: int, dtype: torch.dtype, biased: bool, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype) / inputs**0.5
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, 2 * inputs, generator=generator).to(dtype)[:, :inputs]
    with torch.inference_mode():
        y = Dense(weight, bias).prepare().linear(x)
    assert y.shape == (rows, outputs)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=rounding, atol=rounding)


def test_a_row_is_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    projection = Dense(torch.randn(300, 1500, generator=generator)).prepare()
    x = torch.randn(200, 1500, generator=generator)
    together = projection.linear(x)
    for begin, end in ((0, 1), (7, 9), (30, 33), (100, 105), (3, 199)):
        assert torch.equal(projection.linear(x[begin:end]), together[begin:end])


def test_a_cpu_has_no_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 8192, generator=generator), torch.randn(200, 8192, generator=generator)
    projection = Dense(weight).prepare()
    assert torch.equal(projection.in_parts(x), projection.linear(x))


def test_a_row_that_does_not_fit_is_refused() -> None:
    projection = Dense(torch.zeros(8, 4)).prepare()
    for x in (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="x is"):
            projection.linear(x)


def test_a_shared_weight_is_not_held_twice() -> None:
    """A projection repacks a weight on a CPU: an embedding that is the head, too, would be in memory twice."""
    dense, x = Dense(torch.randn(40, 16)), torch.randn(3, 16)
    before = dense.weight.data_ptr()
    shared = dense.prepare(shared=True)
    assert shared is dense or native_layer_kernels(dense.device, dense.dtype) is None
    torch.testing.assert_close(shared.linear(x), F.linear(x, dense.weight))
    assert dense.look_up(torch.tensor([7, 7])).equal(dense.weight[[7, 7]])
    assert dense.weight.data_ptr() == before


def test_slices_are_views_of_rows_and_their_biases() -> None:
    fused = Dense(torch.zeros(10, 4), torch.zeros(10))
    for tensor in fused.slice(3, 7).tensors().values():
        tensor.fill_(1)
    assert fused.tensor().sum(1).tolist() == [0, 0, 0, 4, 4, 4, 4, 0, 0, 0]
    assert fused.tensors()["bias"].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


def test_each_weight_of_a_stack_multiplies_its_own_rows() -> None:
    stack = DenseStack(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 5))
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    for index, y in enumerate(stack.prepare()(x)):
        torch.testing.assert_close(y + 1, stack.one(index).linear(x[index]))
