"""Layers that attend to a window and to compressed entries: logits are transformers' at any split, with prefixes found
again, forks and pops; all that the pools hold is what its cache holds, entry by entry."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kinds.compressed import compressed_groups
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.spans import Every, Window
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import save_checkpoint
from tests.support.oracle import greedy, likeliest, random_prompt
from tests.support.tvm_cache import TvmCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32 = 1e-4  # relative and absolute
OUTPUT = 12
TEXTS = {
    "deepseek_v4": 110,
    "deepseek_v4-128": 230,
}  # positions: some entries of each kind
PROGRAMS, STEPS = 3, 14


@pytest.fixture(scope="module", params=TEXTS)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_groups(case: str, model: CachedModel) -> None:
    every = 128 if case == "deepseek_v4-128" else 32
    groups = [
        (one.layers, one.keeps, one.head_dim, one.planes, getattr(one.kind, "top_k", None))
        for one in model.cache.layout.groups
    ]
    assert groups == [
        ((0,), Window(24), 32, 1, None),
        ((1, 2, 3), Window(24), 32, 1, None),
        ((2, 3), Window(8), 2 * (32 + 16), 2, None),
        ((2, 3), Every(4), 32, 1, None),
        ((2, 3), Every(4), 16, 1, 6),
        ((1,), Window(every), 32, 2, None),
        ((1,), Every(every), 32, 1, None),
    ]


@pytest.mark.gate("deepseek_v4-128")
@torch.inference_mode()
def test_tokens_at_any_split(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Chunks that end before, at and after entries, from where on entries are chosen, and of one token."""
    length = TEXTS[case]
    text = random_prompt(length, 0)
    expected = oracle(torch.tensor([text])).logits[0, -1:]
    random = np.random.default_rng(0)
    edges = [[], [24], [3, 4, 5, 27, 28, 29], [1, 31, 32, 33], [length - 1]]
    edges += [sorted(random.choice(np.arange(1, length), 5, False))]
    for sequence, splits in enumerate(edges):
        model.cache.add_sequence(sequence)
        logits = model.feed(sequence, text, [int(edge) for edge in splits])
        torch.testing.assert_close(logits, expected, rtol=FLOAT32, atol=FLOAT32)
        model.cache.remove_sequence(sequence)
    model.cache.add_sequence(0)
    tokens = model.generate(0, model.feed(0, text, [31]), OUTPUT)
    assert len(tokens) == OUTPUT
    assert tokens == likeliest(oracle, text, tokens)


@pytest.mark.gate("deepseek_v4-128")
@torch.inference_mode()
def test_short_and_long_sequences_beside_each_other(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    """Some complete no entry, others several; one comes to have more of them than are chosen while it decodes."""
    texts = [random_prompt(length, length) for length in (1, 3, 22, 31, 70, TEXTS[case])]
    for sequence in range(len(texts)):
        model.cache.add_sequence(sequence)
    tokens = [[token] for token in model.sample(model.step(dict(enumerate(texts))))]
    while len(tokens[0]) < OUTPUT:
        sampled = model.sample(model.step({i: of[-1:] for i, of in enumerate(tokens)}))
        tokens = [[*of, token] for of, token in zip(tokens, sampled, strict=True)]
    assert tokens == [likeliest(oracle, text, own) for text, own in zip(texts, tokens, strict=True)]


def expected_entries(text: list[int], oracle: "PreTrainedModel") -> dict[tuple[str, int], Tensor]:
    """Returns by kind and layer what transformers' cache holds after `text`: of windows and inputs the last."""
    from transformers import DynamicCache

    cached = DynamicCache(config=oracle.config)
    oracle(torch.tensor([text]), past_key_values=cached)
    found = {}
    for layer, own in enumerate(cached.layers):
        found["window", layer] = own.keys[0, 0]  # type: ignore[index]
        for name, kind in (("compressor", "entries"), ("indexer", "keys")):
            entries = getattr(own, "compressed_kv", {}).get(name)
            if entries is not None:
                found[kind, layer] = entries[0]
            buffered = getattr(own, "buffer_kv", {}).get(name)
            if buffered is not None:
                found[f"values of {kind}", layer] = buffered[0]
                found[f"gates of {kind}", layer] = own.buffer_gate[name][0]  # type: ignore[union-attr]
    return found


def check_entries(cache: TvmCache, sequence: int, expected: dict[tuple[str, int], Tensor]) -> set[str]:
    """Compares all of them. The kinds that there were."""
    layout, length = cache.layout, cache.num_tokens(sequence)
    place = {layer: cache.layout.layer_index[layer] for layer in range(layout.num_layers)}
    for (kind, layer), theirs in expected.items():
        if kind == "window":
            (group, index), plane = place[layer], 0
        else:
            of = compressed_groups(layout)[layer]
            plane = int(kind.startswith("gates"))
            group = {"entries": of.entries, "keys": of.keys}.get(kind, of.inputs)
            assert group is not None
            index = layout.groups[group].layers.index(layer)
        end = layout.paging[group].num_entries(length)
        ours = cache.gather_group(sequence, group, end - theirs.shape[0], end)[index][plane][:, 0]
        if kind.endswith("of keys"):
            ours = ours[:, -theirs.shape[1] :]
        torch.testing.assert_close(ours[:, : theirs.shape[1]], theirs, rtol=FLOAT32, atol=FLOAT32)
    return {kind for kind, _ in expected}


@pytest.mark.gate("deepseek_v4-128")
@torch.inference_mode()
def test_random_programs_keep_what_transformers_keeps(case: str, saved: Path, oracle: "PreTrainedModel") -> None:
    """The contents of the pools are compared after each step."""
    kinds, did = set[str](), set[str]()
    for seed in range(PROGRAMS):
        program = Program(seed, CachedModel(saved, "float32"), TEXTS[case] - 10)
        for _ in range(STEPS):
            program.step()
            sequence = int(program.random.choice(list(program.texts)))
            text = program.texts[sequence]
            if text:
                kinds |= check_entries(program.cache, sequence, expected_entries(text, oracle))
        did |= program.did
    assert kinds >= {"window", "entries", "keys", "values of entries", "gates of entries", "values of keys"}
    assert did >= {"forks", "pops", "matches", "removals"}


class Program:
    """Sequences grow by any number of tokens, several in a forward, are forked, popped, published, removed and found
    again, as a seed says. texts: what each holds."""

    def __init__(self, seed: int, model: CachedModel, most: int) -> None:
        self.random, self.cache, self.model, self.most = np.random.default_rng(seed), model.cache, model, most
        self.texts: dict[int, list[int]] = {}
        self.published: list[list[int]] = []
        self.did: set[str] = set()
        self.next_id = 0

    def step(self) -> None:
        if len(self.texts) < 2:
            self.begin()
        sequence = int(self.random.choice(list(self.texts)))
        actions = (self.fork, self.pop, self.remove)
        actions[int(self.random.integers(3))](sequence)
        if not self.texts:
            self.begin()
        able = [of for of, text in self.texts.items() if len(text) < self.most - 60 and self.random.random() < 0.7]
        new = {of: random_prompt(int(self.random.integers(1, 60)), int(self.random.integers(1 << 30))) for of in able}
        if new:
            self.model.step(new)
        for of, tokens in new.items():
            self.texts[of] += tokens

    def begin(self) -> None:
        sequence, self.next_id = self.next_id, self.next_id + 1
        self.cache.add_sequence(sequence)
        self.texts[sequence] = []
        if self.published:
            text = self.published[int(self.random.integers(len(self.published)))] + random_prompt(9, sequence)
            matched = self.cache.match_prefix(sequence, text)
            self.texts[sequence] = text[:matched]
            self.did |= {"matches"} if matched else set()

    def fork(self, sequence: int) -> None:
        length = len(self.texts[sequence]) - int(self.random.integers(0, 9))
        if (
            len(self.texts) < 4
            and length >= 0
            and self.is_accepted("fork", lambda: self.cache.fork_sequence(sequence, self.next_id, length))
        ):
            self.texts[self.next_id] = self.texts[sequence][:length]
            self.next_id += 1

    def pop(self, sequence: int) -> None:
        text, count = self.texts[sequence], int(self.random.integers(1, 7))
        if count <= len(text) and self.is_accepted("pop", lambda: self.cache.pop(sequence, count)):
            del text[len(text) - count :]

    def is_accepted(self, what: str, call: Callable[[], None]) -> bool:
        """Calls it; False where what the windows of the shorter text show is gone."""
        try:
            call()
        except InvalidArgument as error:
            if "have left the window" not in str(error):
                raise
            self.did |= {f"{what} refused"}
            return False
        self.did |= {f"{what}s"}
        return True

    def remove(self, sequence: int) -> None:
        self.cache.publish_prefix(sequence, self.texts[sequence])
        self.published.append(self.texts.pop(sequence))
        self.cache.remove_sequence(sequence)
        self.did |= {"removals"}


@pytest.mark.gate("deepseek_v4-128")
@torch.inference_mode()
def test_prefixes_forks_and_pops(case: str, model: CachedModel, oracle: "PreTrainedModel") -> None:
    length, cache = TEXTS[case], model.cache
    text, grain = random_prompt(length, 1), cache.layout.grain
    expected = greedy(oracle, text, OUTPUT)
    cache.add_sequence(0)
    model.feed(0, text, [50])
    cache.publish_prefix(0, text)
    cache.fork_sequence(0, 1, length - 3)
    assert model.generate(1, model.feed(1, text, []), OUTPUT) == expected
    cache.pop(0, 5)
    assert model.generate(0, model.feed(0, text, [length - 2]), OUTPUT) == expected
    cache.remove_sequence(0)
    cache.remove_sequence(1)
    cache.add_sequence(2)
    assert cache.match_prefix(2, text) == length // grain * grain > 0
    assert model.generate(2, model.feed(2, text, []), OUTPUT) == expected
    cache.remove_sequence(2)
    for other in range(3, 12):  # the pools have 64 pages: what was published is evicted
        cache.add_sequence(other)
        model.feed(other, random_prompt(200, other), [])
        cache.publish_prefix(other, random_prompt(200, other))
        cache.remove_sequence(other)
    cache.add_sequence(12)
    assert cache.match_prefix(12, text) == 0
    assert model.generate(12, model.feed(12, text, []), OUTPUT) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 3},
        {"sliding_window": 16},
        {"swiglu_limit": 10.0},
        {"hc_sinkhorn_iters": 2},
        {"hc_eps": 0.1},
        {"routed_scaling_factor": 1.0},
        {"scoring_func": "sigmoid"},
        {"rms_norm_eps": 0.1},
    ],
)
def test_other_fields_give_other_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    """The tests above would notice each field."""
    saved = save_checkpoint("deepseek_v4", tmp_path)
    text = random_prompt(TEXTS["deepseek_v4"], 0)
    expected = last_logits(saved, text)
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert float((last_logits(saved, text) - expected).abs().max()) > 1e-3


@torch.inference_mode()
def last_logits(saved: Path, text: list[int]) -> Tensor:
    model = CachedModel(saved, "float32")
    model.cache.add_sequence(0)
    return model.feed(0, text, [])
