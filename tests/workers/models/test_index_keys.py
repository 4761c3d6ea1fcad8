"""Layers that attend to chosen positions: logits equal transformers' at any split, with prefixes found again, forks
and pops. So do the index keys in its cache."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tandem.cache.kinds.index import index_keys
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import CASES
from tests.support.oracle import greedy, random_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32 = 1e-4  # relative and absolute
TEXT, OUTPUT = 90, 12  # positions, several times as many as are chosen


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.inference_mode()
def test_tokens_at_any_split(model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Chunks that end before, at and after 24, from where on positions are chosen, and of one token."""
    text = random_prompt(TEXT, 0)
    expected = oracle(torch.tensor([text])).logits[0, -1:]
    random = np.random.default_rng(0)
    splits = [[], [24], [23, 24, 25], [1, 60], *(sorted(random.choice(np.arange(1, TEXT), 5, False)) for _ in range(4))]
    for sequence, edges in enumerate(splits):
        model.cache.add_sequence(sequence)
        logits = model.feed(sequence, text, [int(edge) for edge in edges])
        torch.testing.assert_close(logits, expected, rtol=FLOAT32, atol=FLOAT32)
        model.cache.remove_sequence(sequence)
    model.cache.add_sequence(0)
    assert model.generate(0, model.feed(0, text, [31]), OUTPUT) == greedy(oracle, text, OUTPUT)


@torch.inference_mode()
def test_short_and_long_sequences_beside_each_other(model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Sequences with at most as many positions as are chosen attend to all. One crosses that border while it
    decodes."""
    texts = [random_prompt(length, length) for length in (3, 20, 24, 25, 70)]
    for sequence in range(len(texts)):
        model.cache.add_sequence(sequence)
    tokens = [[token] for token in model.sample(model.step(dict(enumerate(texts))))]
    while len(tokens[0]) < OUTPUT:
        for of, token in zip(
            tokens, model.sample(model.step({i: of[-1:] for i, of in enumerate(tokens)})), strict=True
        ):
            of.append(token)
    assert tokens == [greedy(oracle, text, OUTPUT) for text in texts]


@torch.inference_mode()
def test_prefixes_forks_and_pops(model: CachedModel, oracle: "PreTrainedModel") -> None:
    text, cache = random_prompt(TEXT, 1), model.cache
    expected = greedy(oracle, text, OUTPUT)
    cache.add_sequence(0)
    model.feed(0, text, [50])
    cache.publish_prefix(0, text)
    cache.fork_sequence(0, 1, 55)  # in the midst of a page
    assert model.generate(1, model.feed(1, text, []), OUTPUT) == expected
    cache.pop(0, 61)
    assert model.generate(0, model.feed(0, text, [40]), OUTPUT) == expected
    cache.remove_sequence(0)
    cache.remove_sequence(1)
    cache.add_sequence(2)
    assert cache.match_prefix(2, text) == TEXT // 16 * 16
    assert model.generate(2, model.feed(2, text, []), OUTPUT) == expected
    cache.remove_sequence(2)
    for other in range(3, 9):  # the pools have 64 pages: what was published is evicted
        cache.add_sequence(other)
        model.feed(other, random_prompt(180, other), [])
        cache.publish_prefix(other, random_prompt(180, other))
        cache.remove_sequence(other)
    cache.add_sequence(9)
    assert cache.match_prefix(9, text) == 0
    assert model.generate(9, model.feed(9, text, []), OUTPUT) == expected


@torch.inference_mode()
def test_every_index_key_is_transformers(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Here the rotated numbers come last, and halves first where neighbours are rotated."""
    from transformers import DynamicCache

    text, cached = random_prompt(TEXT, 2), DynamicCache(config=oracle.config)
    oracle(torch.tensor([text]), past_key_values=cached)
    model.cache.add_sequence(0)
    model.feed(0, text, [7, 33, 34])
    found = dict(zip(index_keys(model.cache.layout), model.cache.gather_group(0, 1, 0, TEXT), strict=True))
    assert list(found) == ([0, 1, 2] if case == "deepseek_v32" else [0, 2])
    rotated = CASES[case][1]["qk_rope_head_dim"]
    for layer, (keys, _) in found.items():
        theirs = cached.layers[layer].indexer_keys[0]  # type: ignore[union-attr]
        expected = torch.cat((theirs[:, rotated:], theirs[:, :rotated]), 1)
        torch.testing.assert_close(keys[:, 0], expected, rtol=FLOAT32, atol=FLOAT32)


def test_half_of_the_positions_chosen_gives_other_logits(saved: Path, oracle: "PreTrainedModel") -> None:
    """So the tests above notice what is chosen."""
    text = random_prompt(TEXT, 0)
    with torch.inference_mode():
        expected = oracle(torch.tensor([text])).logits[0, -1:]
    path = saved / "config.json"
    config = path.read_text()
    assert '"index_topk": 24' in config
    try:
        path.write_text(config.replace('"index_topk": 24', '"index_topk": 12'))
        model = CachedModel(saved, "float32")
    finally:
        path.write_text(config)
    model.cache.add_sequence(0)
    with torch.inference_mode():
        assert float((model.feed(0, text, []) - expected).abs().max()) > 0.05
