"""A forward of a prompt chunk, decodes and drafts that are verified gives what separate forwards give."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.kinds.compressed import compressed_groups
from tandem.cache.plan.errors import InvalidArgument
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import random_prompt
from tests.support.tolerances import assert_close

# K and V, windows and readers, sinks, latents, index keys, compressed KV
FAMILIES = ["qwen3", "gemma4", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "deepseek_v4"]
CACHED = {0: 0, 1: 21, 2: 40, 3: 33, 4: 16}  # positions before the forward: a new prompt, a later chunk, three decodes
MORE = {0: 30, 1: 19, 2: 1, 3: 4, 4: 1}  # of sequence 3 a token and three that were drafted
TREE = [-1, 0, 0, 1]

Parents = list[Sequence[int] | None]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def model_with_contexts(folder: Path) -> CachedModel:
    model = CachedModel(folder, "float32")
    for sequence, length in CACHED.items():
        model.cache.add_sequence(sequence)
        if length:
            launch(model, [sequence], 0, length)
    return model


def launch(model: CachedModel, sequences: list[int], begin: int, count: int, parents: Parents | None = None) -> Tensor:
    """Logits of all of the tokens begin … begin + count - 1 of one sequence."""
    (sequence,) = sequences
    tokens = np.array(random_prompt(80, sequence)[begin : begin + count])
    return model.runner.launch(Batch(sequences, [count], token_tree_parents=parents), tokens, None)


def launch_all(model: CachedModel, parents: Parents | None = None) -> Tensor:
    tokens = [random_prompt(80, sequence)[CACHED[sequence] :][:count] for sequence, count in MORE.items()]
    batch = Batch(list(MORE), list(MORE.values()), token_tree_parents=parents)
    return model.runner.launch(batch, np.concatenate(tokens), None)


@pytest.mark.gate("*-a token tree", "qwen3-*", "gemma4-*", "gpt_oss-*")
@pytest.mark.parametrize("tree", [None, TREE], ids=["drafts in a row", "a token tree"])
def test_a_mixed_batch_gives_what_separate_forwards_give(folder: Path, tree: list[int] | None) -> None:
    mixed, apart = model_with_contexts(folder), model_with_contexts(folder)
    if tree and compressed_groups(mixed.cache.layout):
        with pytest.raises(InvalidArgument, match="keeps an entry for 4 positions, which no node may complete"):
            launch_all(mixed, [tree if sequence == 3 else None for sequence in MORE])
        return
    logits = launch_all(mixed, [tree if sequence == 3 else None for sequence in MORE] if tree else None)
    expected = [
        launch(apart, [sequence], CACHED[sequence], count, [tree] if tree and sequence == 3 else None)
        for sequence, count in MORE.items()
    ]
    assert logits.argmax(1).tolist() == torch.cat(expected).argmax(1).tolist()
    assert_close(logits, torch.cat(expected))
    for model in (mixed, apart) if tree else ():
        model.cache.commit_token_tree([3], [3])
    for sequence in MORE:
        begin, end = mixed.cache.first_position(sequence), mixed.cache.num_tokens(sequence)
        assert end == CACHED[sequence] + (3 if tree and sequence == 3 else MORE[sequence])
        kv = (model.cache.gather_kv(sequence, begin, end) for model in (mixed, apart))
        for ours, theirs in zip(*kv, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_close(mine, other)


def test_drafts_are_verified_as_tokens_come_one_by_one(folder: Path) -> None:
    """The logits after each of four tokens equal those of four steps beside the other sequences."""
    mixed, stepped = model_with_contexts(folder), model_with_contexts(folder)
    logits = launch_all(mixed)[49 + 1 : 49 + 5]
    expected = [launch(stepped, [3], CACHED[3] + step, 1) for step in range(4)]
    assert logits.argmax(1).tolist() == torch.cat(expected).argmax(1).tolist()
    assert_close(logits, torch.cat(expected))
