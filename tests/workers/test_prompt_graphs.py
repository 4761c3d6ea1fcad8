"""Forwards of prompts over fixed arrays, as they are in CUDA graphs, against plain ones; here they are run anew."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.workers.batch_buckets import MOST_PROMPT_TOKENS, MOST_PROMPTS, prompt_sizes
from tandem.workers.model_cache import kv_layout, make_cache
from tandem.workers.model_runner import ModelRunner
from tandem.workers.models.registry import load_config
from tandem.workers.weights import load_decoder
from tests.cache.table_kernels import TableKernels
from tests.checkpoints import save_checkpoint
from tests.oracle import random_prompt

LONGEST, PAGE = 256, 8
LENGTHS = (1, 31, 32, 33, 64, 65, 127, 128, 129, 200)
FAMILIES = ["qwen3", "gemma3", "gpt_oss", "qwen3_moe"]  # two have windows, one of these sinks


class Prompts:
    """A runner whose forwards of prompts are counted, those that a graph would be replayed for."""

    def __init__(self, folder: Path, graphs: bool) -> None:
        config = load_config(folder, "float32")
        layout = kv_layout(config, PAGE)
        self.pools = [torch.full((200, *layout.page_shape(group)), torch.nan) for group in range(len(layout.groups))]
        self.cache: PagedKVCache = make_cache(
            config, layout, self.pools, max_sequences=24, max_length=LONGEST, kernels=TableKernels
        )
        self.runner = ModelRunner(load_decoder(folder, config), self.cache)
        self.replays = 0
        if graphs:
            self.runner.capture_prompts(128, self._counting)

    def _counting(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        memory = compute().clone()  # as of a graph, in the same place each time

        def replay() -> Tensor:
            self.replays += 1
            return memory.copy_(compute())

        return replay

    def run(self, chunks: dict[int, list[int]], whole: dict[int, int]) -> Tensor:
        tokens = [np.array(chunk) for chunk in chunks.values()]
        return self.runner.prompts(list(chunks), tokens, [whole[one] for one in chunks], push=False)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_lone_prompt(folder: Path, length: int) -> None:
    """Whole, then behind a prefix of its own, in the same graph; all beyond the largest go eagerly."""
    fixed, plain = (Prompts(folder, graphs) for graphs in (True, False))
    prompt = random_prompt(length + 20, length)
    made = []
    for prompts in (fixed, plain):
        prompts.cache.add_sequence(0)
        first = prompts.run({0: prompt[:length]}, {0: length})
        made.append((first, prompts.run({0: prompt[length:]}, {0: length + 20})))
    for ours, theirs in zip(*made, strict=True):
        assert ours.shape[0] == 1
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert fixed.replays == 1 + (length <= 128)
    assert_same_kv(fixed, plain, [0])


# Of each forward the tokens that sequences get; all are asked for at the end, of WHOLE.
FORWARDS: list[dict[int, int]] = [
    {0: 20},
    {1: 30, 2: 4, 3: 1},
    {3: 40, 1: 27, 2: 61},
    {3: 100, 4: 60},  # too many tokens for a graph
    {sequence: 5 for sequence in range(4, 4 + MOST_PROMPTS)},
    {sequence: 1 for sequence in range(4, 5 + MOST_PROMPTS)},  # too many sequences
    {sequence: 3 for sequence in reversed(range(5, 5 + MOST_PROMPTS))},
    {20: 100, 19: 28},
]
WHOLE = {sequence: sum(forward.get(sequence, 0) for forward in FORWARDS) for sequence in range(5 + MOST_PROMPTS)}


def test_several_prompts_in_chunks(folder: Path) -> None:
    """Some end in a forward, some go on."""
    fixed, plain = (Prompts(folder, graphs) for graphs in (True, False))
    prompts = {sequence: random_prompt(length, sequence) for sequence, length in WHOLE.items()}
    done = dict.fromkeys(WHOLE, 0)
    for each in (fixed, plain):
        for sequence in WHOLE:
            each.cache.add_sequence(sequence)
    for forward in FORWARDS:
        chunks = {one: prompts[one][done[one] : done[one] + count] for one, count in forward.items()}
        ours, theirs = (each.run(chunks, WHOLE) for each in (fixed, plain))
        done.update({one: done[one] + count for one, count in forward.items()})
        assert ours.shape[0] == sum(done[one] == WHOLE[one] for one in forward)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert done == WHOLE
    assert fixed.replays == len(FORWARDS) - 2
    assert_same_kv(fixed, plain, list(WHOLE))


def assert_same_kv(fixed: Prompts, plain: Prompts, sequences: list[int]) -> None:
    """Of these sequences; nobody has written anywhere else."""
    for sequence in sequences:
        length = plain.cache.num_tokens(sequence)
        assert fixed.cache.num_tokens(sequence) == length
        first = plain.cache.first_position(sequence)
        both = (prompts.cache.gather_kv(sequence, first, length) for prompts in (fixed, plain))
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(fixed.pools, plain.pools, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())


def test_what_a_forward_gives_is_its_callers(folder: Path) -> None:
    """The next one has the same memory."""
    prompts = Prompts(folder, graphs=True)
    for sequence in range(2):
        prompts.cache.add_sequence(sequence)
    first = prompts.run({0: random_prompt(9, 0)}, {0: 9})
    before = first.clone()
    prompts.run({1: random_prompt(10, 1)}, {1: 10})
    assert torch.equal(first, before)


@pytest.mark.parametrize("family", ["deepseek_v3", "phi3-longrope"])
def test_what_no_graph_can_do_is_plain(family: str, tmp_path: Path) -> None:
    """Latents, and RoPE by the sequence's length."""
    folder = save_checkpoint(family, tmp_path)
    runner = Prompts(folder, graphs=True).runner
    assert not runner.has_prompt_graph(1, 1)


def test_forwards_that_push_are_plain(folder: Path) -> None:
    prompts = Prompts(folder, graphs=True)
    prompts.cache.add_sequence(0)
    prompts.runner.prompts([0], [np.array(random_prompt(9, 0))], [9], push=True)
    assert prompts.replays == 0


@pytest.mark.parametrize(
    ("limit", "last"), [(1, [32, 64]), (65, [64, 128]), (512, [448, 512]), (513, [512, 640]), (9999, [1792, 2048])]
)
def test_sizes(limit: int, last: list[int]) -> None:
    sizes = prompt_sizes(limit)
    assert sizes[-2:] == last
    assert all(small < large <= 2 * small for small, large in pairwise(sizes))
    assert sizes[-1] <= max(64, MOST_PROMPT_TOKENS)
