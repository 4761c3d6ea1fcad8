"""DeepSeek-V4 on a GPU: forwards and graphs give transformers' tokens in float32, and in 16 bits each other's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import make_model, save_checkpoint, sizes_on_gpu
from tests.support.oracle import greedy, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
LENGTHS = (1, 3, 23, 30, 70, 120)  # around windows and entries
OUTPUT = 80
SPLITS = ([], [24], [3, 4, 5, 27, 32, 33], [119])
FLOAT32 = 1e-4  # relative and absolute


def steps(model: CachedModel, tokens: list[int], count: int) -> list[list[int]]:
    """Returns so many greedy tokens of each sequence, each row's from the step before."""
    rows, sampling = list(range(len(tokens))), SampleBatch.from_params([SamplingParams(temperature=0)] * len(tokens))
    found = [tokens]
    for _ in range(count):
        positions = np.array([model.cache.num_tokens(row) + 1 for row in rows], np.int64)
        ids, sources = np.array(found[-1], np.int64), np.full(len(rows), -1)
        found.append(model.runner.step(rows, ids, sources, sampling, positions).wait().token_ids.tolist())
    return [list(one) for one in zip(*found, strict=True)]


def begun(model: CachedModel) -> list[int]:
    """The first token after each prompt."""
    first = list[int]()
    for sequence, length in enumerate(LENGTHS):
        model.cache.add_sequence(sequence)
        first += model.sample(model.step({sequence: random_prompt(length, length)}))
    return first


@pytest.fixture(params=["deepseek_v4", "deepseek_v4-128"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_checkpoint(request.param, tmp_path)


@torch.inference_mode()
def test_prompts_in_chunks_equal_those_of_a_cpu(folder: Path) -> None:
    text, gpu, cpu = random_prompt(150, 0), CachedModel(folder, "float32", "cuda"), CachedModel(folder, "float32")
    for sequence, splits in enumerate(SPLITS):
        for model in (gpu, cpu):
            model.cache.add_sequence(sequence)
        ours, theirs = (model.feed(sequence, text, splits) for model in (gpu, cpu))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=FLOAT32, atol=FLOAT32)
        for model in (gpu, cpu):
            model.cache.remove_sequence(sequence)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_tokens_equal_transformers_in_float32(folder: Path, graphs: bool) -> None:
    model, oracle = CachedModel(folder, "float32", "cuda"), load_oracle(folder, device="cuda")
    if graphs:
        model.runner.capture_steps(8)
        assert model.runner.overlaps, "no graph was captured"
    found = steps(model, begun(model), OUTPUT - 1)
    assert found == [greedy(oracle, random_prompt(length, length), OUTPUT) for length in LENGTHS]


def counting(made: list[int]) -> Callable[..., Callable[[], torch.Tensor]]:
    """A capture, and how often what it gave was replayed."""
    capture = GraphCapture()

    def captured(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = capture(compute)

        def counted() -> torch.Tensor:
            made.append(1)
            return replay()

        return counted

    return captured


def test_verify_steps_in_graphs_equal_transformers_in_float32(folder: Path) -> None:
    """Three tokens of each sequence at a time: all right, then two of them wrong and taken back."""
    model, oracle, replayed = CachedModel(folder, "float32", "cuda"), load_oracle(folder, device="cuda"), list[int]()
    model.runner.capture_steps(8)
    model.runner.capture_verification(32, counting(replayed))
    first = begun(model)
    expected = [greedy(oracle, random_prompt(length, length), OUTPUT) for length in LENGTHS]
    assert first == [tokens[0] for tokens in expected]
    rows, done = list(range(len(LENGTHS))), 0
    sampling = SampleBatch.from_params([SamplingParams(temperature=0)] * len(rows))
    while done + 4 < OUTPUT:
        wrong = done % 2
        drafts = [[one[done], *([7, 8] if wrong else one[done + 1 : done + 3])] for one in expected]
        positions = np.array([model.cache.num_tokens(row) + 1 for row in rows], np.int64)
        ids = [np.array(one, np.int64) for one in drafts]
        found = model.runner.verify(rows, ids, sampling, positions).wait().token_ids.tolist()
        kept = 1 if wrong else 3
        for row in rows:
            assert found[3 * row :][:kept] == expected[row][done + 1 :][:kept]
            model.cache.pop(row, 3 - kept)
        done += kept
    assert replayed, "every verify step was eager"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_give_what_eager_steps_give_in_16_bits(dtype: str, tmp_path: Path) -> None:
    make_model("deepseek_v4", **sizes_on_gpu("deepseek_v4")).save_pretrained(tmp_path)
    found = list[list[list[int]]]()
    for graphs in (False, True):
        model = CachedModel(tmp_path, dtype, "cuda")
        if graphs:
            model.runner.capture_steps(8)
            assert model.runner.overlaps
        found.append(steps(model, begun(model), 12))
    same = [ours == theirs for ours, theirs in zip(*found, strict=True)]
    assert sum(same) >= len(same) - 1, "rows differ by rounding at most where two logits are nearly alike"
