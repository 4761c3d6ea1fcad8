"""Tests that a profile of joint steps counts kernels, and that every order gives the tokens of the worker's own."""

from pathlib import Path

import pytest
import torch

from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.mixed_orders import ORDERS, in_order
from tests.benchmarks.mixed_steps import WARM_STEPS, by_kernel
from tests.benchmarks.timeline import FIRST_KERNEL, Span
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.prompt_programs import RunInOnePlace
from tests.support.steps_with_prompts import Beside

STEPS = 4


def test_kernels_are_counted_by_step() -> None:
    """Each step: 10 µs, then two kernels of 20 and 30 µs that begin together, then 5 µs of nothing."""
    spans = []
    for step in range(WARM_STEPS + STEPS):
        begin = 45.0 * step
        spans.append(Span(begin, begin + 10, FIRST_KERNEL))
        spans += [Span(begin + 10, begin + 30, "short"), Span(begin + 10, begin + 40, "long")]
    sums, lines = by_kernel(spans, STEPS)
    assert sums == {"wall": 43.8, "busy": 40.0, "kernels": 60.0, "together": 20.0}
    assert [line.split()[-1] for line in lines] == ["long", "short", FIRST_KERNEL]
    assert lines[0].split()[:3] == ["30.0", "µs", "1.0"]


@pytest.mark.parametrize("order", ["joined", "in turn"])
def test_an_order_gives_the_logits_of_others(order: str, tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    assert order in ORDERS

    def run() -> torch.Tensor:
        params = SamplingParams(temperature=0)
        return Beside(folder, capture=RunInOnePlace(), together=True, params=params, kernels=TableKernels).logits

    own = run()
    with in_order(order):
        assert torch.equal(run(), own)
