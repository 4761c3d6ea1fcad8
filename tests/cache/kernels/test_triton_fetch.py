"""A step's arrays fetched from the host's memory: on a GPU, else in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tandem.cache.kernels.triton import fetch as triton_fetch
from tandem.cache.kernels.triton.fetch import fetch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.mark.parametrize("pairs", [0, 1, 31, 32, 33, 200])
def test_what_was_filled_is_fetched_and_said_so(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs than blocks of numbers fetch, or more. What lies after the numbers stays."""
    monkeypatch.setattr(triton_fetch, "BLOCK", 32)
    monkeypatch.setattr(triton_fetch, "MOST_PROGRAMS", 3)
    host, fetched = torch.arange(2, 404, pin_memory=ON_GPU), torch.zeros(1, dtype=torch.int64, pin_memory=ON_GPU)
    on_device, finished = torch.full((400,), -1, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for filling in (1, 2):
        host[0], host[1] = filling, pairs
        host[2:] += 1000
        fetch(host, on_device, finished, fetched)
        if ON_GPU:
            torch.cuda.synchronize()
        assert on_device[: 2 * pairs].tolist() == host[2 : 2 + 2 * pairs].tolist()
        assert (on_device[2 * pairs :] == -1).all()
        assert (fetched.item(), finished.item()) == (filling, 0)
