"""Decode steps with adapters in graph buffers; here what would be a graph is computed anew."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cache.table_kernels import TableKernels
from tests.support.adapted_model import AdaptedModel
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import RunInOnePlace

ROWS, STEPS = 7, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("captured"))


def models(folder: Path, adapters: Path, slots: int) -> tuple[AdaptedModel, AdaptedModel]:
    """One whose steps are captured, and one with a slot for each adapter whose steps are not."""
    captured = AdaptedModel(folder, adapters, slots=slots, count=3, rank=4, kernels=TableKernels)
    captured.runner.capture_steps(ROWS, RunInOnePlace())
    captured.runner.capture_prompts(128, RunInOnePlace())
    assert captured.runner.overlaps
    return captured, AdaptedModel(folder, adapters, slots=3, count=3, rank=4)


def tokens_of(model: AdaptedModel, adapters: Sequence[int | None]) -> list[list[int]]:
    prompts = {row: random_prompt(9 + 2 * row, row) for row in range(len(adapters))}
    for row, adapter in enumerate(adapters):
        model.add(row, adapter)
    firsts = model.prompts(prompts).argmax(1).tolist()
    found = [firsts, *model.steps(dict(enumerate(firsts)), STEPS)]
    for row in prompts:
        model.remove(row)
    return found


def test_graphs_compute_rows_of_unlike_adapters(folder: Path, tmp_path: Path) -> None:
    captured, plain = models(folder, tmp_path, slots=3)
    wanted = [tokens_of(plain, adapters) for adapters in ([0, 1, 2, None, 1, 0, 2], [None] * ROWS, [None, 2, None])]
    assert [
        tokens_of(captured, adapters) for adapters in ([0, 1, 2, None, 1, 0, 2], [None] * ROWS, [None, 2, None])
    ] == wanted
    assert wanted[0] != wanted[1]


def test_a_slot_that_is_given_away_has_the_other_adapter(folder: Path, tmp_path: Path) -> None:
    captured, plain = models(folder, tmp_path, slots=2)
    for adapters in ([0, 1], [2, None], [1, 2], [0, 0], [2, 1]):
        assert tokens_of(captured, list(adapters)) == tokens_of(plain, list(adapters))
