"""Hyper-connections in Triton against torch: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.base import HyperParameters, HyperSettings
from tandem.workers.kernels.torch.hyper import TorchHyperKernels
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.workers.kernels.triton import hyper
from tandem.workers.kernels.triton.hyper import TritonHyperKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = {"one": (1, 4, 96), "odd": (5, 3, 72), "several tiles": (67, 2, 24), "eight": (2, 8, 40), "single": (3, 1, 33)}
# Each shape in one dtype, each dtype with one shape: in bfloat16 tiles are others, of more tokens where there are many.
BOTH = [
    *(("one", dtype) for dtype in DTYPES),
    ("several tiles", torch.bfloat16),
    ("several tiles", torch.float16),
    ("odd", torch.float16),
    ("odd", torch.bfloat16),
    ("eight", torch.float32),
    ("single", torch.bfloat16),
]
SETTINGS = HyperSettings(iterations=4, eps=1e-6, norm_eps=1e-6)
REFERENCE, TRITON = TorchHyperKernels(), TritonHyperKernels()


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def parameters_of(shape: tuple[int, int, int], count: int, scales: int) -> HyperParameters:
    """Draws parameters whose weights differ much from each other."""
    width = shape[1] * shape[2]
    scale = 1 + draw(scales, seed=4).abs()
    return HyperParameters(2 * draw(count, width, seed=2) / width**0.5, draw(count, seed=3), scale)


@pytest.fixture(params=[(256, 256), (3, 24)], ids=["one split each", "splits and loops"], autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, columns = request.param
    monkeypatch.setattr(hyper, "PROGRAMS", programs)
    if columns < 256:
        for name in ("COLUMNS_OF_FEW", "COLUMNS_OF_MANY", "HIDDEN_OF_FEW", "HIDDEN_OF_MANY"):
            monkeypatch.setattr(hyper, name, 32)
        monkeypatch.setattr(hyper, "COLUMNS_OF_EXACT", 16)


@pytest.mark.gate("one split each-*", "splits and loops-odd-*")
@pytest.mark.parametrize(("name", "dtype"), BOTH, ids=str)
def test_what_a_block_takes(name: str, dtype: torch.dtype) -> None:
    """Streams of unlike size, so that without the norm weights would be others."""
    shape = SHAPES[name]
    sizes = 1 + torch.arange(shape[0], device=DEVICE) % 3
    streams = 2 * draw(*shape, seed=1, dtype=dtype) * sizes.view(-1, 1, 1).to(dtype)
    parameters = parameters_of(shape, (2 + shape[1]) * shape[1], 3)
    for found, expected in zip(
        TRITON.open(streams, parameters, SETTINGS), REFERENCE.open(streams, parameters, SETTINGS), strict=True
    ):
        assert found.dtype == expected.dtype
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["one", "odd", "eight"])
def test_weights_are_of_float32_beside_streams_of_16_bits(name: str) -> None:
    shape = SHAPES[name]
    streams, parameters = draw(*shape, seed=1, dtype=torch.bfloat16), parameters_of(shape, (2 + shape[1]) * shape[1], 3)
    _, *found = TRITON.open(streams, parameters, SETTINGS)
    _, *expected = REFERENCE.open(streams, parameters, SETTINGS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "dtype"), BOTH, ids=str)
def test_streams_behind_a_block(name: str, dtype: torch.dtype) -> None:
    shape = tokens, streams, hidden = SHAPES[name]
    residual, output = draw(*shape, seed=1, dtype=dtype), draw(tokens, hidden, seed=2, dtype=dtype)
    post, mix = draw(tokens, streams, seed=3), draw(tokens, streams, streams, seed=4)
    found, expected = (one.close(residual, output, post, mix) for one in (TRITON, REFERENCE))
    assert_close(found, expected)


@pytest.mark.parametrize(("name", "dtype"), BOTH, ids=str)
def test_what_the_last_norm_takes(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[name]
    streams, parameters = 5 * draw(*shape, seed=1, dtype=dtype), parameters_of(shape, shape[1], 1)
    found, expected = (one.collapse(streams, parameters, SETTINGS) for one in (TRITON, REFERENCE))
    assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter
def test_a_token_without_numbers_leaves_others_alone() -> None:
    """Rows of padding of a graph may hold anything."""
    streams, parameters = draw(3, 4, 64, seed=1), parameters_of((3, 4, 64), 24, 3)
    expected = [one[[0, 2]] for one in TRITON.open(streams, parameters, SETTINGS)]
    streams[1] = torch.nan
    for found, one in zip(TRITON.open(streams, parameters, SETTINGS), expected, strict=True):
        assert torch.equal(found[[0, 2]], one)
