"""LoRA adapters by Triton's kernels, in its interpreter, against torch's and a naive product."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.workers.kernels.adapter_linear import AdapterMatrices
from tandem.workers.kernels.torch.adapters import TorchAdapters

pytest.importorskip("triton")

from tandem.workers.kernels.triton.adapters import TritonAdapters


def matrices_of(
    slots: int, rank: int, ends: tuple[int, ...], columns: int, generator: torch.Generator
) -> AdapterMatrices:
    """Makes matrices of slots that lie in one memory, with other numbers between them."""
    a, b = len(ends) * rank * columns, ends[-1] * rank
    memory = torch.randn(slots, a + b + 7, generator=generator) / rank
    views = memory[:, :a].unflatten(1, (-1, columns)), memory[:, a : a + b].unflatten(1, (-1, rank))
    return AdapterMatrices(*views, ends, torch.tensor(ends, dtype=torch.int32))


def naive(y: Tensor, x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> Tensor:
    y, rank = y.clone().double(), matrices.rank
    for row, slot in enumerate(slots.tolist()):
        for part, (begin, end) in enumerate(pairwise((0, *matrices.ends))):
            if slot >= 0:
                a = matrices.a[slot, part * rank : (part + 1) * rank].double()
                y[row, begin:end] += matrices.b[slot, begin:end].double() @ (a @ x[row].double())
    return y


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    rows=st.sampled_from([1, 3, 16, 17, 70]),
    num_slots=st.integers(1, 4),
    rank=st.sampled_from([4, 8, 16, 24, 40]),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    columns=st.sampled_from([40, 130, 600]),
)
def test_each_row_gets_what_its_adapter_adds(
    seed: int, rows: int, num_slots: int, rank: int, widths: list[int], columns: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ends = tuple(sum(widths[: index + 1]) for index in range(len(widths)))
    matrices = matrices_of(num_slots, rank, ends, columns, generator)
    x, y = (torch.randn(rows, size, generator=generator) for size in (columns, ends[-1]))
    slots = torch.randint(-1, num_slots, (rows,), generator=generator)
    wanted = naive(y, x, matrices, slots)
    for kernels in (TorchAdapters(), TritonAdapters()):
        found = y.clone()
        kernels.add(found, x, matrices, slots)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)
        assert torch.equal(found[slots < 0], y[slots < 0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("kernels", [TorchAdapters(), TritonAdapters()], ids=["torch", "triton"])
def test_numbers_that_are_not_finite_stay_with_their_rows(kernels: TorchAdapters | TritonAdapters) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = matrices_of(3, 8, (20, 33), 50, generator)
    matrices.a[1], matrices.b[2] = torch.nan, torch.inf
    x, y = torch.randn(9, 50, generator=generator), torch.randn(9, 33, generator=generator)
    slots = torch.tensor([0, 1, 2, -1, 0, 1, 2, 0, -1])
    wanted = naive(y, x, matrices, slots)
    kernels.add(y, x, matrices, slots)
    finite = slots < 1
    torch.testing.assert_close(y[finite].double(), wanted[finite], rtol=1e-4, atol=1e-3)
    assert not y[~finite].isfinite().any()


def test_kernels_are_compiled_by_rows_of_no_slot() -> None:
    matrices = matrices_of(2, 8, (20, 33), 600, torch.Generator().manual_seed(0))
    before = matrices.a.clone(), matrices.b.clone()
    TritonAdapters().compile(matrices)
    assert torch.equal(matrices.a, before[0])
    assert torch.equal(matrices.b, before[1])
