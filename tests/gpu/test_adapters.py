"""LoRA adapters on a GPU: their products, steps in CUDA graphs, and adapters that come in beside steps."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.adapter_linear import AdapterMatrices
from tandem.workers.kernels.choice import choose_adapter_kernels
from tandem.workers.kernels.torch.adapters import TorchAdapters
from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.weights.adapted import AdaptedProjection
from tests.support.adapted_model import AdaptedModel
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
SHAPES = {
    "qkv": (4096, (4096, 5120, 6144)),
    "down": (12288, (4096,)),
    "odd": (130, (33, 70)),
    "rates": (256, (6, 12)),
}
MOSTLY = 0.8  # of the tokens of a model in bfloat16 that are the same
ROWS, ADAPTERS, STEPS = 20, 5, 8


def random_matrices(slots: int, rank: int, columns: int, ends: tuple[int, ...], dtype: torch.dtype) -> AdapterMatrices:
    a, b = len(ends) * rank * columns, ends[-1] * rank
    memory = torch.randn(slots, -(-(a + b) // 64) * 64, device="cuda").mul_(columns**-0.5).to(dtype)
    views = memory[:, :a].unflatten(1, (-1, columns)), memory[:, a : a + b].unflatten(1, (-1, rank))
    return AdapterMatrices(*views, ends, torch.tensor(ends, dtype=torch.int32, device="cuda"))


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """wanted: in float32, rounded once."""
    exact = found.dtype == torch.float32
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=1e-3 if exact else 0.02, atol=1e-3 if exact else 0.03
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_products_equal_the_references(shape: str, rank: int, dtype: torch.dtype) -> None:
    columns, ends = SHAPES[shape]
    matrices = random_matrices(8, rank, columns, ends, dtype)
    for rows in (1, 2, 16, 40, 64, 65, 300, 2048):
        x, y = (torch.randn(rows, size, device="cuda").to(dtype) for size in (columns, ends[-1]))
        slots = torch.randint(-1, 8, (rows,), device="cuda")
        wanted, found = y.clone(), y.clone()
        TorchAdapters().add(wanted, x, matrices, slots)
        choose_adapter_kernels(torch.device("cuda")).add(found, x, matrices, slots)
        assert_alike(found, wanted)
        assert torch.equal(found[slots < 0], y[slots < 0])


def test_a_graph_follows_the_slots_of_its_rows() -> None:
    columns, ends = SHAPES["qkv"]
    matrices, kernels = (
        random_matrices(8, 16, columns, ends, torch.bfloat16),
        choose_adapter_kernels(torch.device("cuda")),
    )
    x, slots = torch.randn(64, columns, device="cuda").bfloat16(), torch.zeros(64, dtype=torch.int64, device="cuda")

    def compute() -> Tensor:
        y = torch.ones(64, ends[-1], dtype=torch.bfloat16, device="cuda")
        kernels.add(y, x, matrices, slots)
        return y

    replay = GraphCapture()(compute)
    for _ in range(3):
        slots.copy_(torch.randint(-1, 8, (64,), device="cuda"))
        wanted = torch.ones(64, ends[-1], dtype=torch.bfloat16, device="cuda")
        TorchAdapters().add(wanted, x, matrices, slots)
        assert_alike(replay(), wanted)


def test_what_is_not_finite_stays_with_its_rows() -> None:
    columns, ends = SHAPES["odd"]
    matrices = random_matrices(3, 16, columns, ends, torch.bfloat16)
    matrices.a[1], matrices.b[2] = torch.nan, torch.inf
    x, y = torch.randn(40, columns, device="cuda").bfloat16(), torch.zeros(40, ends[-1], device="cuda").bfloat16()
    slots = torch.arange(40, device="cuda") % 4 - 1
    choose_adapter_kernels(torch.device("cuda")).add(y, x, matrices, slots)
    assert y[slots < 1].isfinite().all()
    assert not y[slots == 1].isfinite().any()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_steps_in_graphs_have_the_adapters_of_their_rows(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without adapters and rows of five, against eager steps by the reference."""
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path / "model")
    tokens = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(AdaptedProjection, "linear", by_reference)
        model = AdaptedModel(
            tmp_path / "model", tmp_path / "adapters", slots=ADAPTERS, count=ADAPTERS, dtype="bfloat16", device="cuda"
        )
        if captured:
            model.runner.capture_steps(ROWS)
            assert model.runner.overlaps
        tokens.append(run(model, [None if row % 6 == 5 else row % 6 for row in range(ROWS)]))
    same = [one == other for mine, theirs in zip(*tokens, strict=True) for one, other in zip(mine, theirs, strict=True)]
    assert sum(same) >= MOSTLY * len(same)


def by_reference(projection: AdaptedProjection, x: Tensor) -> Tensor:
    y = projection._base.linear(x)
    if projection._rows.slots is not None:
        TorchAdapters().add(y, x, projection._matrices, projection._rows.slots)
    return y


def run(model: AdaptedModel, adapters: Sequence[int | None]) -> list[list[int]]:
    """Tokens of STEPS steps of as many rows, whose inputs do not depend on the model."""
    prompts = {row: random_prompt(20 + row, row) for row in range(len(adapters))}
    for row, adapter in enumerate(adapters):
        model.add(row, adapter)
    model.prompts(prompts)
    found = [model.steps({row: 7 + row + step for row in prompts}, 1)[0] for step in range(STEPS)]
    for row in prompts:
        model.remove(row)
    return found


def test_adapters_come_in_beside_steps(tmp_path: Path) -> None:
    """Two slots for five adapters: a slot is filled while steps run that read what was there, and later ones wait."""
    make_model("qwen3", **sizes_on_gpu("qwen3")).save_pretrained(tmp_path / "model")
    few, many = (
        AdaptedModel(
            tmp_path / "model", tmp_path / "adapters", slots=slots, count=ADAPTERS, dtype="bfloat16", device="cuda"
        )
        for slots in (2, ADAPTERS)
    )
    for model in (few, many):
        model.runner.capture_steps(4)
    for round in range(3):
        for first in range(ADAPTERS):
            pair = [first, (first + 1 + round) % ADAPTERS]
            assert run(few, [*pair, None]) == run(many, [*pair, None])
