"""Checks the memory of results, which the CUDA graphs of one capture share."""

import pytest
import torch

from tandem.workers.runner.forward_graphs import GraphCapture, borrow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
NUMBERS = 16 << 20
GRAPHS = 5


def test_graphs_keep_no_results_of_their_own() -> None:
    number, capture = torch.ones(1, device="cuda"), GraphCapture()
    replays = [capture(lambda: number.repeat(2 * NUMBERS)[:NUMBERS])]
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    for graph in range(1, GRAPHS):
        replays.append(capture(lambda graph=graph: number.repeat(NUMBERS // (graph + 1)) + graph))
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - held
    assert taken < NUMBERS * number.element_size() // 2, f"{taken} bytes for smaller graphs"
    for more in range(2):
        number.fill_(10 + more)
        for graph in reversed(range(GRAPHS)):
            result = replays[graph]()
            assert result.shape == (NUMBERS // (graph + 1),)
            assert torch.all(result == 10 + more + graph)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_a_borrowed_view_has_the_numbers_of_its_tensor(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        whole = torch.arange(600, device="cuda").to(dtype).view(20, 30)
        for view in (whole, whole[3:], whole[:, 5:9], whole.T):
            borrowed = borrow(view)
            assert borrowed.dtype == dtype
            assert borrowed.data_ptr() == view.data_ptr()
            assert torch.equal(borrowed, view)
            view.add_(1)
            assert torch.equal(borrowed, view)
