"""A filter that is added where CONTRIBUTING.md says reaches the sampler. No other file names one."""

import inspect
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.torch import sampler as reference
from tandem.workers.runner import eager_sampler, step_inputs
from tandem.workers.runner.eager_sampler import EagerSampler
from tandem.workers.sampling import sample_batch
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import ROW, SamplingParams
from tests.test_docs import ROOT

PRODUCT = ("cache", "transfer", "workers", "cluster", "proto")
GENERATED = {"proto/inference_pb2.py", "proto/inference_pb2.pyi", "proto/sampling.py"}
CHOSEN = {
    "cluster/cli/commands.py",  # has options for some
    "cluster/config/sections.py",  # names those of generation_config.json
    "cluster/requests/default_sampling.py",  # reads that file as vLLM does
    "cluster/requests/warm_up.py",  # sends a request with some
}
MOST_FILES = 6


@dataclass(frozen=True)
class MoreParams(SamplingParams):
    least: float = 0.0  # as min_p


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds `least`, as a line in sampling_params.py and an argument of the reference would."""
    row, filtered = {**ROW, "least": np.float64}, reference._filtered

    def with_least(logits: Tensor, least: Tensor, **others: Tensor) -> Tensor:
        weights = filtered(logits, **others)
        return weights * (weights >= least * weights.amax(-1, keepdim=True))

    number = step_inputs.NUM_SAMPLING + 1
    for module in (sample_batch, step_inputs):
        monkeypatch.setattr(module, "ROW", row)
    for module in (step_inputs, eager_sampler):
        monkeypatch.setattr(module, "NUM_SAMPLING", number)
    monkeypatch.setattr(reference, "_filtered", with_least)


@pytest.mark.usefixtures("added")
def test_an_added_filter_reaches_the_sampler() -> None:
    """Through rows that join and leave."""
    strict, loose = MoreParams(least=0.5, seed=1), MoreParams(seed=1)
    batch = SampleBatch.from_params([strict, loose]).join(SampleBatch.from_params([loose, strict]))
    batch = batch.take(np.array([3, 1, 0]))
    logits, sampler = torch.zeros(3, 100), EagerSampler(torch.device("cpu"))
    logits[:, 9] = 5.0  # as likely as all others together
    steps = [sampler.sample(logits, batch, np.full(3, position)).wait().token_ids.tolist() for position in range(20)]
    first, second, third = map(set, zip(*steps, strict=True))
    assert first == third == {9}
    assert len(second) > 3


@pytest.mark.usefixtures("added")
def test_a_filter_stands_where_its_name_is() -> None:
    batch = SampleBatch.from_params([MoreParams(least=0.25, top_k=3, min_p=0.5, seed=7)] * 2)
    none = np.zeros(2, np.int64)
    packed = step_inputs.pack_inputs(none, none, 5, batch, np.arange(2))
    *_, tickets, sampling = step_inputs.unpack_inputs([torch.from_numpy(array) for array in packed])
    assert tickets.tolist() == [5, 5]
    given = {name: column.tolist() for name, column in sampling.parameters.items()}
    assert [*given] == [*ROW, "least"]
    assert (given["least"], given["top_k"], given["min_p"]) == ([0.25] * 2, [3] * 2, [0.5] * 2)


def test_kernels_take_each_parameter_of_a_row() -> None:
    assert {*inspect.signature(reference._filtered).parameters} == {"logits", *ROW}
    kernel = pytest.importorskip("tandem.workers.kernels.triton.sampling").sample_tokens
    assert {*ROW, "uniforms"} <= {*inspect.signature(kernel.fn).parameters}


def test_no_other_file_names_a_filter() -> None:
    """min_p, which only filters, is looked for."""
    named = {
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.p*")
        if path.suffix in (".py", ".pyi", ".proto") and re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))
    }
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = recipe.partition("### A sampling parameter")[2].partition("No other file")[0]
    by_hand = {"docs/http-and-grpc.md", "tests/workers/sampling"} | named - GENERATED - CHOSEN
    assert all(name in recipe for name in by_hand), by_hand
    assert len(by_hand) <= MOST_FILES
