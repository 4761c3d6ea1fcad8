"""Forwards of prompts in graph buffers, as for CUDA graphs, against plain ones; here they are run anew."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.workers.runner.batch_buckets import prompt_sizes
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import CAPTURED, FORWARDS, NUM_PLAIN, PromptRunner, RunInOnePlace, assert_same_kv
from tests.support.whole_prompts import compute_prompts

LENGTHS = (1, 31, 32, 33, 64, 65, 127, 128, 129, 200)
FAMILIES = ["qwen3", "gemma4", "gpt_oss", "qwen3_moe", "llama4"]  # two have windows, one of these sinks; one has chunks
TOLERANCE = 1e-4


def captured(folder: Path) -> PromptRunner:
    return PromptRunner(folder, RunInOnePlace(), TableKernels)


def plain(folder: Path) -> PromptRunner:
    return PromptRunner(folder, None, TableKernels)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.gate("qwen3-*", "gemma4-129", "gpt_oss-65", "llama4-33", "qwen3_moe-1")
@pytest.mark.parametrize("length", LENGTHS)
def test_a_lone_prompt(folder: Path, length: int) -> None:
    """Whole, then after a prefix of its own, in the same graph; all beyond the largest go eagerly."""
    both, prompt = (captured(folder), plain(folder)), random_prompt(length + 20, length)
    for runner in both:
        runner.cache.add_sequence(0)
    for begin, end in ((0, length), (length, length + 20)):
        ours, theirs = (runner.forward({0: prompt[begin:end]}, {0: end}) for runner in both)
        assert ours.shape[0] == 1
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert both[0].replays == 1 + (length <= CAPTURED)
    assert_same_kv(*both, TOLERANCE)


@pytest.mark.parametrize("longest", [5, 24])
def test_graphs_of_more_tokens_than_a_sequence_may_have(folder: Path, longest: int) -> None:
    """The largest are those that as many sequences as a graph may have can fill."""
    lengths = {sequence: min(longest, 1 + 7 * sequence) for sequence in range(6)}
    ours, theirs = (PromptRunner(folder, capture, TableKernels, longest=longest) for capture in (RunInOnePlace(), None))
    logits = []
    for runner in (ours, theirs):
        for sequence in lengths:
            runner.cache.add_sequence(sequence)
        prompts = {sequence: random_prompt(length, sequence) for sequence, length in lengths.items()}
        logits.append(runner.forward(prompts, lengths))
    torch.testing.assert_close(*logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.replays == 1


def test_several_prompts_in_chunks(folder: Path) -> None:
    """Some end in a forward, some go on."""
    both = captured(folder), plain(folder)
    ours, theirs = (runner.run_all() for runner in both)
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
    assert both[0].replays == len(FORWARDS) - NUM_PLAIN
    assert_same_kv(*both, TOLERANCE)


def test_what_a_forward_gives_is_its_callers(folder: Path) -> None:
    """The next one has the same memory."""
    runner = captured(folder)
    for sequence in range(2):
        runner.cache.add_sequence(sequence)
    first = runner.forward({0: random_prompt(9, 0)}, {0: 9})
    before = first.clone()
    runner.forward({1: random_prompt(10, 1)}, {1: 10})
    assert torch.equal(first, before)


@pytest.mark.parametrize("family", ["deepseek_v3", "phi3-longrope"])
def test_what_no_graph_can_do_is_plain(family: str, tmp_path: Path) -> None:
    """Latents, and RoPE by the sequence's length."""
    assert not captured(save_checkpoint(family, tmp_path)).runner.has_prompt_graph(1, 1)


def test_forwards_that_push_are_plain(folder: Path) -> None:
    runner = captured(folder)
    runner.cache.add_sequence(0)
    compute_prompts(runner.runner, [0], [np.array(random_prompt(9, 0))], [9], push=True)
    assert runner.replays == 0


@pytest.mark.parametrize(
    ("limit", "hidden", "last"),
    [
        (1, 64, [32, 64]),
        (65, 64, [64, 96]),
        (512, 64, [448, 512]),
        (513, 64, [512, 640]),
        (9999, 1024, [3584, 4096]),
        (9999, 4096, [896, 1024]),
        (9999, 5120, [640, 768]),
        (9999, 99999, [32, 64]),
    ],
)
def test_sizes(limit: int, hidden: int, last: list[int]) -> None:
    sizes = prompt_sizes(limit, hidden)
    assert sizes[-2:] == last
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))


def test_drafts_are_verified_in_graphs_of_their_own(folder: Path) -> None:
    """One row, several with drafts of unlike lengths, some without; too many tokens go eagerly."""
    both, sampling = (captured(folder), plain(folder)), SamplingParams(temperature=0.8, seed=3)
    both[0].runner.capture_verification(16, both[0].counting(RunInOnePlace()))
    prompts = {sequence: random_prompt(9 + sequence, sequence) for sequence in range(6)}
    for runner in both:
        for sequence, prompt in prompts.items():
            runner.cache.add_sequence(sequence)
            runner.forward({sequence: prompt}, {sequence: len(prompt)})
    replays, cache = both[0].replays, both[0].cache
    for sizes in ({2: 4}, {0: 1, 1: 3, 4: 2, 5: 5}, {3: 1, 2: 1}, {0: 16}, {1: 9, 2: 8}):
        tokens = [np.array(random_prompt(size, sequence)) for sequence, size in sizes.items()]
        positions = np.array([cache.num_tokens(sequence) + 1 for sequence in sizes])
        rows = SampleBatch.from_params([sampling] * len(sizes))
        ours, theirs = (one.runner.verify(list(sizes), tokens, rows, positions).wait() for one in both)
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.token_ids.size == sum(sizes.values())
    assert both[0].replays == replays + 4
    assert_same_kv(*both, TOLERANCE)
