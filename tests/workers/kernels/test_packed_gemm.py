"""packed.cu on this machine's CPU (see emulated/device.h) against products of numbers that are unpacked one by one."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.expert_blocks import expert_blocks
from tandem.workers.kernels.packed_linear import PackedLinear
from tandem.workers.kernels.skinny_gemm import packed
from tandem.workers.kernels.skinny_gemm.packed import WARPS, Arguments, PackedGemms, packed_defines
from tandem.workers.kernels.torch.packed import TorchPacked, dequantize
from tests.support.packed_weights import random_packed
from tests.workers.kernels.emulated.library import COMPILER, library_builder

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
SOURCE = Path(__file__).parent / "emulated" / "packed.cpp"
CASES: dict[str, dict[str, Any]] = {
    "groups": {"group": 64, "columns": 1216},
    "zeros and a bias": {"group": 32, "columns": 288, "zeros": True, "bias": True},
    "a row": {"group": 96, "columns": 96},
    "floats": {"group": 32, "columns": 1440, "is_float": True, "bias": True},
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class EmulatedFunction:
    """Stands in for driver.py's Function."""

    def __init__(self, run: Any, name: str, *, threads: int, shared_bytes: int) -> None:
        assert threads == 32 * WARPS
        self._run, self._name, self._shared_bytes = run, name, shared_bytes

    def launch(self, blocks: int, arguments: tuple[Arguments]) -> None:
        assert self._run(self._name.encode(), blocks, self._shared_bytes, ctypes.byref(arguments[0])) == 0


class NoOthers(TorchPacked):
    """packed.cu must serve what is tested."""

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        raise AssertionError("others multiply")

    grouped = linear  # type: ignore[assignment]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return library_builder(SOURCE, tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def gemms(build: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> PackedGemms:
    options = tuple(one.replace("\\,", ",") for one in packed_defines(DTYPES[dtype]))  # as nvcc alone wants commas
    run = build(options).run_packed_gemm
    monkeypatch.setattr(packed, "Module", lambda _: run)
    monkeypatch.setattr(packed, "Function", EmulatedFunction)
    return PackedGemms(b"", DTYPES[dtype], NoOthers())


def draw(*shape: int, case: str, dtype: torch.dtype) -> PackedLinear:
    options = {name: value for name, value in CASES[case].items() if name != "columns"}
    return random_packed(*shape, CASES[case]["columns"], dtype=dtype, **options)


def check(y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected.float(), rtol=2 * rounding, atol=rounding)


@pytest.mark.gate("*-bfloat16", "8-zeros*")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 8, 13, 40])
def test_products_are_those_of_the_dequantized_matrix(
    case: str, tokens: int, dtype: str, gemms: PackedGemms, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (case, dtype) == ("floats", "float16"):
        pytest.skip("numbers of E2M1 become those of bfloat16 alone")
    for tall in (10_000, 10):  # blocks of one tile, and of two
        monkeypatch.setattr(packed, "TALL", tall)
        weights = draw(70, case=case, dtype=DTYPES[dtype])
        x = torch.randn(tokens, weights.columns + 8).to(DTYPES[dtype])[:, : weights.columns]
        matrix = dequantize(weights, 0, 70).to(x.dtype).float()
        bias = None if weights.bias is None else weights.bias.float()
        check(gemms.linear(x, weights), F.linear(x.float(), matrix, bias), DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("case", ["zeros and a bias", "floats"])
@pytest.mark.parametrize(("tokens", "width"), [(3, 16), (40, 16), (40, 32)])
def test_each_token_is_multiplied_by_its_experts(
    case: str, tokens: int, width: int, dtype: str, gemms: PackedGemms
) -> None:
    weights = draw(5, 40, case=case, dtype=DTYPES[dtype])
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, 5, generator=generator).argsort(1)[:, :2]
    x = torch.randn(tokens, weights.columns, generator=generator).to(DTYPES[dtype])
    factors = torch.rand(2 * tokens, generator=generator)
    blocks = expert_blocks(chosen, 5, width)
    y, expected = (one.grouped(x, weights, blocks, factors, 2) for one in (gemms, TorchPacked()))
    check(y, expected, DTYPES[dtype])
