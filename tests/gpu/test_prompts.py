"""Prompts in CUDA graphs against the eager path: lone ones around the graphs' sizes, several at once, in chunks."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.plan.kv_scales import KVScales
from tandem.workers.runner.forward_graphs import GraphCapture
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt
from tests.support.prompt_programs import CAPTURED, FORWARDS, NUM_PLAIN, PromptRunner, assert_same_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
CASES = {
    "qwen3-bf16-128": ("qwen3", "bfloat16", {"head_dim": 128, "hidden_size": 256}),
    "llama": ("llama", "float16", sizes_on_gpu("llama")),
    "phi3-96": ("phi3-head-dim", "float16", sizes_on_gpu("phi3-head-dim")),
    "qwen3_moe": ("qwen3_moe", "float16", sizes_on_gpu("qwen3_moe")),
    "gpt_oss": ("gpt_oss", "float16", sizes_on_gpu("gpt_oss")),  # a window and sinks
    "llama4": ("llama4", "float16", sizes_on_gpu("llama4")),  # chunks
    "gemma4": ("gemma4", "float16", sizes_on_gpu("gemma4")),  # heads of 512
}
LOGPROB = {"float16": 0.03, "bfloat16": 0.2}  # transformers' own are off by as much from float32
ENTRY = {"float16": 0.02, "bfloat16": 0.15}
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", "llama4")
MOSTLY = 0.9  # of the best tokens are the same, and of the tokens' entries, where there are experts
SCALES = KVScales(((0.01,), (0.02, 0.015)), ((0.02,), (0.01, 0.03)))


def pair(folder: Path, dtype: str, scales: KVScales | None = None) -> tuple[PromptRunner, PromptRunner]:
    """One that captures, and one that does not."""
    captures = GraphCapture(), None
    ours, theirs = (
        PromptRunner(folder, capture, choose_kernels, dtype=dtype, device="cuda", scales=scales) for capture in captures
    )
    return ours, theirs


def assert_alike(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, share: float = 1.0) -> None:
    """share: of the rows, at least, that are as near as that."""
    assert ours.shape == theirs.shape
    best = theirs.argmax(-1)
    assert (ours.argmax(-1) == best).float().mean() >= MOSTLY
    mine, other = (logits.float().log_softmax(-1).gather(1, best[:, None]) for logits in (ours, theirs))
    assert ((mine - other).abs() <= tolerance).float().mean() >= share


@pytest.mark.parametrize("case", CASES)
def test_several_prompts_in_chunks(case: str, tmp_path: Path) -> None:
    family, dtype, sizes = CASES[case]
    make_model(family, **sizes).save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path, dtype)
    share = MOSTLY if case in WITH_EXPERTS else 1.0
    assert_alike(ours.run_all(), theirs.run_all(), LOGPROB[dtype], share)
    assert ours.replays == len(FORWARDS) - NUM_PLAIN
    # A token between two experts may take the other one, and is another in all layers after.
    assert_same_kv(ours, theirs, ENTRY[dtype], share)


def test_lone_prompts_around_the_sizes(tmp_path: Path) -> None:
    """Each after a prefix too; the logits of one stay when the next is computed."""
    make_model("qwen3", head_dim=128, hidden_size=256).save_pretrained(tmp_path)
    both = pair(tmp_path, "bfloat16")
    lengths = (1, 2, 31, 32, 33, 63, 64, 65, 127, CAPTURED)
    made = []
    for runner in both:
        logits = []
        for sequence, length in enumerate(lengths):
            prompt = random_prompt(length + 40, sequence)
            runner.cache.add_sequence(sequence)
            logits.append(runner.forward({sequence: prompt[:length]}, {sequence: length}))
            logits.append(runner.forward({sequence: prompt[length:]}, {sequence: length + 40}))
        made.append(torch.cat(logits))
    assert_alike(made[0], made[1], LOGPROB["bfloat16"])
    assert both[0].replays == 2 * len(lengths)
    assert_same_kv(*both, ENTRY["bfloat16"])


def test_over_kv_in_8_bits(tmp_path: Path) -> None:
    make_model("qwen3", head_dim=128, hidden_size=256).save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path, "float16", SCALES)
    # What is rounded a little differently may become the neighbouring entry.
    assert_alike(ours.run_all(), theirs.run_all(), 0.1)
    assert ours.replays == len(FORWARDS) - NUM_PLAIN


def test_nothing_is_collected_within_a_capture() -> None:
    collects: list[bool] = []
    number = torch.ones(1, device="cuda")

    def compute() -> torch.Tensor:
        collects.append(gc.isenabled())
        return number + 1

    replay = GraphCapture()(compute)
    assert collects == [True, False]
    assert gc.isenabled()
    number.fill_(5)
    assert replay().item() == 6


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_verified_in_graphs(case: str, tmp_path: Path) -> None:
    """Drafts have unlike lengths, and some rows have none. Logits, K and V equal the eager path's."""
    family, dtype, sizes = CASES[case]
    make_model(family, **sizes).save_pretrained(tmp_path)
    both = pair(tmp_path, dtype)
    both[0].runner.capture_verification(32, both[0].counting(GraphCapture()))
    sampling, found = SamplingParams(temperature=0), []
    for runner in both:
        for sequence in range(6):
            runner.cache.add_sequence(sequence)
            prompt = random_prompt(40 + 9 * sequence, sequence)
            runner.forward({sequence: prompt}, {sequence: len(prompt)})
        sampled: list[np.ndarray] = []
        before, cache = runner.replays, runner.cache
        for counts in ({2: 4}, {0: 1, 1: 3, 4: 2, 5: 5}, {3: 8, 2: 8, 1: 8, 0: 8}):
            tokens = [np.array(random_prompt(count, sequence)) for sequence, count in counts.items()]
            positions = np.array([cache.num_tokens(sequence) + 1 for sequence in counts])
            rows = SampleBatch.from_params([sampling] * len(counts))
            samples = runner.runner.verify(list(counts), tokens, rows, positions).wait()
            sampled.append(samples.token_ids)
        found.append((np.concatenate(sampled), runner.replays - before))
    assert (found[0][0] == found[1][0]).mean() >= MOSTLY
    assert found[0][1] == 3
    assert found[1][1] == 0
    assert_same_kv(*both, ENTRY[dtype], MOSTLY if case in WITH_EXPERTS else 1.0)
