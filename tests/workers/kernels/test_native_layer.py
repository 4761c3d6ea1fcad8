"""The kernels of native_layer.c against torch's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.cache.kernels.native.crew import load_crew
from tandem.workers.kernels.choice import choose_layer_kernels
from tandem.workers.kernels.native.layer import NativeLayerKernels
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tandem.workers.weights.dense import Dense

REFERENCE = TorchLayerKernels()
WIDTHS = st.sampled_from([1, 7, 8, 32, 100, 256])


@pytest.fixture(autouse=True, scope="module", params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    crew = load_crew()
    assert crew is not None, "the tests need a C compiler"
    crew.threads = request.param
    yield
    crew.threads = 1


def native() -> NativeLayerKernels:
    kernels = choose_layer_kernels(torch.device("cpu"), torch.float32)
    assert isinstance(kernels, NativeLayerKernels)
    return kernels


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=25)
@given(rows=st.sampled_from([0, 1, 2, 33, 300]), width=WIDTHS, with_delta=st.booleans())
def test_add_rms_norm(rows: int, width: int, with_delta: bool) -> None:
    x, delta, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)
    mine, theirs = x.clone(), x.clone()
    given_delta = delta.clone() if with_delta else None
    out = native().add_rms_norm(mine, given_delta, weight, 1e-5)
    assert_near(out, REFERENCE.add_rms_norm(theirs, delta if with_delta else None, weight, 1e-5))
    assert torch.equal(mine, theirs)
    assert given_delta is None or torch.equal(given_delta, delta)


@settings(max_examples=25)
@given(rows=st.sampled_from([0, 1, 5, 150]), heads=st.integers(1, 9), width=WIDTHS)
def test_norm_heads_of_rows_that_lie_apart(rows: int, heads: int, width: int) -> None:
    whole, weight = normal(rows, heads + 2, width), normal(heads, width, seed=1)
    before = whole.clone()
    out = native().norm_heads(whole[:, :heads], weight, 1e-6)
    assert_near(out, REFERENCE.norm_heads(whole[:, :heads], weight, 1e-6))
    assert torch.equal(whole, before)


@settings(max_examples=25)
@given(rows=st.sampled_from([0, 1, 3, 200]), width=WIDTHS, scale=st.sampled_from([1.0, 20.0, 1e4]))
def test_silu_mul(rows: int, width: int, scale: float) -> None:
    gate_up = normal(rows, 2 * width) * scale
    assert_near(native().silu_mul(gate_up), REFERENCE.silu_mul(gate_up))


def test_what_is_not_finite_stays_in_its_element() -> None:
    gate_up = torch.tensor([[torch.nan, torch.inf, 2.0, -3.0, 1.0, 1.0, torch.nan, 1.0]])
    out = native().silu_mul(gate_up)[0]
    assert out[:3].isnan().tolist() == [True, False, True]
    assert out[1] == torch.inf
    assert_near(out[3:], torch.nn.functional.silu(torch.tensor([-3.0])))


def test_rows_of_any_stride() -> None:
    gate_up, heads, weight = normal(20, 3), normal(4, 16, 3), normal(4, 3)
    assert_near(native().silu_mul(gate_up.T), REFERENCE.silu_mul(gate_up.T))
    assert_near(
        native().norm_heads(heads.transpose(0, 1), weight, 1e-6),
        REFERENCE.norm_heads(heads.transpose(0, 1), weight, 1e-6),
    )


def test_any_number_of_threads_gives_the_same_bits() -> None:
    crew = load_crew()
    assert crew is not None
    own, outputs = crew.threads, []
    projection, x = Dense(normal(2000, 300), normal(2000)).prepare(), normal(40, 300, seed=3)
    for count in (1, 2, 4):
        crew.threads = count
        outputs.append(projection.linear(x))
    crew.threads = own
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    """Jobs of many sizes follow each other at once, so that a helper that is late for one meets the next."""
    cases = [(Dense(normal(outputs, 64)).prepare(), normal(rows, 64)) for outputs in (700, 5000) for rows in (1, 9, 60)]
    expected = [projection.linear(x) for projection, x in cases]

    def many(first: int) -> bool:
        order = [(first + number) % len(cases) for number in range(200)]
        return all(torch.equal(cases[i][0].linear(cases[i][1]), expected[i]) for i in order)

    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(many, range(3)))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_torch_serves_what_native_code_does_not(device: str, dtype: torch.dtype) -> None:
    assert isinstance(choose_layer_kernels(torch.device(device), dtype), TorchLayerKernels)
