"""States of recurrent layers on a GPU: kernels in Qwen3-Next's sizes, in a CUDA graph, and models cut at borders of
chunks. test_families has workers with such models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.states import look_up_states
from tandem.cache.kernels.base import DeviceTables, GroupPlan, Limits
from tandem.cache.kernels.delta.kernels import DeltaRuns, DeltaSteps, TritonDeltaKernels
from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, RecurrentInputs, SsdShape, StateShape
from tandem.cache.kernels.torch.recurrent import TorchStateKernels
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.cache.plan.tables import PageTables, StateWrites, TokenLayout, lay_out_tokens, look_up_pages
from tests.gpu.test_steps import DRAWN, FLOAT16_LOGPROB, GREEDY, PROGRAM, assert_graphs_go_on
from tests.support.cached_model import CachedModel
from tests.support.checkpoints import KEEP_STATES, make_model, sizes_on_gpu
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
NEXT = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, tail=3)
SHAPES = {
    "Qwen3-Next": NEXT,
    "odd": DeltaShape(key_heads=2, value_heads=6, key_dim=12, value_dim=20, tail=2),
    "Kimi Linear": KdaShape(key_heads=32, value_heads=32, key_dim=128, value_dim=128, tail=3),
    "odd KDA": KdaShape(key_heads=6, value_heads=6, key_dim=12, value_dim=20, tail=2),
    "Nemotron-H": SsdShape(num_heads=128, groups=8, head_dim=64, state_size=128, tail=3),
    "Nemotron Nano": SsdShape(num_heads=128, groups=8, head_dim=80, state_size=128, tail=3),
    "odd Mamba-2": SsdShape(num_heads=6, groups=2, head_dim=20, state_size=12, tail=2),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYERS, LAYER, PAGES, ROWS, STEPS = 2, 1, 12, 8, 3
# Of each forward the new tokens of sequences: prompts, single tokens beside chunks, and borders of chunks.
FORWARDS: list[dict[int, int]] = [
    {0: 64, 1: 1, 2: 200},
    {0: 1, 1: 63, 2: 1, 3: 65},
    {3: 128, 1: 2, 0: 1},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 700, 3: 1},
]
# Of some forwards the sequences that leave snapshots, and after which of their new tokens.
SNAPSHOTS: list[dict[int, int]] = [{2: 130}, {0: 1, 1: 2, 3: 65}, {3: 64, 1: 1}, {1: 1}, {2: 512}]
CUT_AT = (1, 63, 64, 65)


class Both:
    """The reference in float32 on the CPU, and Triton's kernels, over pools full of NaN, given the same numbers."""

    def __init__(self, shape: StateShape, dtype: torch.dtype) -> None:
        pool = torch.full((PAGES, LAYERS, 1, 1, 1, shape.numbers), torch.nan)
        self.shape, self.dtype = shape, dtype
        self.reference, self.kernels = TorchStateKernels(pool, shape), TritonDeltaKernels(pool.cuda(), shape)
        self.pages = np.random.default_rng(0).permutation(PAGES)[:, None].astype(np.int32)
        self.lengths = np.zeros(PAGES, np.int64)
        self.kept = set[int]()  # pages of snapshots, which are those of the last rows

    def lay_out(
        self, counts: dict[int, int], snapshots: Mapping[int, int] = MappingProxyType({})
    ) -> tuple[TokenLayout, PageTables]:
        """snapshots: for a sequence the number of new tokens after which it leaves one."""
        rows = np.array(list(counts))
        tokens = lay_out_tokens(self.lengths[rows], np.array(list(counts.values())))
        self.lengths[rows] += list(counts.values())
        places = np.array([list(counts).index(row) for row in snapshots], np.int64)
        pages = self.pages[ROWS : ROWS + len(snapshots), 0].astype(np.int64)
        self.kept.update(pages.tolist())
        writes = StateWrites(places, np.array(list(snapshots.values()), np.int64), pages)
        return tokens, replace(look_up_states(self._look_up, rows, tokens), writes=writes)

    def _look_up(self, rows: Int64Array, entries: TokenLayout) -> PageTables:
        return look_up_pages(self.pages, rows, entries, 1)

    def draw(self, num_tokens: int, seed: int) -> RecurrentInputs:
        generator, shape = torch.Generator("cuda").manual_seed(seed), self.shape

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda")

        mixed = numbers(num_tokens, shape.channels) + numbers(shape.channels) * 0.5
        conv, bias, skip = numbers(shape.channels, shape.tail + 1) * 0.5, None, None
        log_decay, strength = (
            -0.2 * numbers(num_tokens, *shape.decays).abs(),
            numbers(num_tokens, shape.heads).sigmoid(),
        )
        if isinstance(shape, SsdShape):
            bias, skip = numbers(shape.channels).to(self.dtype), numbers(shape.heads)
        return RecurrentInputs(mixed.to(self.dtype), conv.to(self.dtype), log_decay, strength, bias, skip)

    def expected(self, tokens: TokenLayout, tables: PageTables, x: RecurrentInputs) -> Tensor:
        return self.expected_of((x,), tokens, tables, LAYER)[0]

    def expected_of(
        self, layers: Sequence[RecurrentInputs], tokens: TokenLayout, tables: PageTables, first: int = 0
    ) -> list[Tensor]:
        """Computes layers from `first` on, in one forward."""
        plan = GroupPlan(self.reference.plan(tokens, tables), None)
        exact = (RecurrentInputs(*(None if one is None else one.float().cpu() for one in x)) for x in layers)  # type: ignore[arg-type]
        return [self.reference.run(plan, layer, x) for layer, x in enumerate(exact, first)]

    def check(self, found: Tensor, expected: Tensor) -> None:
        """Compares relative to the largest number, with the bounds of products of the dtype."""
        bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}[self.dtype]
        assert float((found.cpu().double() - expected.double()).abs().max()) <= bound * float(expected.abs().max())

    def check_states(self) -> None:
        ours, theirs = self.kernels._pool.flatten(2), self.reference._entries
        written = [*self.pages[self.lengths > 0, 0].tolist(), *sorted(self.kept)]
        assert torch.isnan(ours[:, 1 - LAYER]).all()
        assert torch.isnan(ours[[page for page in range(PAGES) if page not in written]]).all()
        self.check(ours[written, LAYER], theirs[written, LAYER])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_forwards_equal_the_reference(shape: StateShape, dtype: torch.dtype) -> None:
    both = Both(shape, dtype)
    for seed, (counts, snapshots) in enumerate(zip(FORWARDS, SNAPSHOTS, strict=True)):
        tokens, tables = both.lay_out(counts, snapshots)
        x = both.draw(int(tokens.qo_indptr[-1]), seed)
        expected = both.expected(tokens, tables, x)
        both.check(both.kernels.run(GroupPlan(both.kernels.plan(tokens, tables), None), LAYER, x), expected)
        both.check_states()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_a_graph_computes_steps_of_any_rows(shape: StateShape, dtype: torch.dtype) -> None:
    """Captured once, with rows of padding in most steps, and with rows that leave snapshots. The graph computes three
    steps one after another, so that a kernel may begin while the step before still runs."""
    both = Both(shape, dtype)
    tokens, tables = both.lay_out({row: 3 + row for row in range(ROWS)})
    x = both.draw(int(tokens.qo_indptr[-1]), 99)
    both.expected(tokens, tables, x)
    both.kernels.run(GroupPlan(both.kernels.plan(tokens, tables), None), LAYER, x)
    empty = torch.zeros(ROWS + 1, dtype=torch.int32, device="cuda")
    slots, kept = (torch.full_like(empty[:-1], -1) for _ in range(2))
    static = DeviceTables(slots, empty, torch.ones_like(slots), empty, kept=kept)
    places = [both.draw(ROWS, 0) for _ in range(STEPS)]
    own = both.kernels.buffers(Limits.of_step(ROWS, 4, 1), static)
    graph, outputs = capture(own, places)
    for seed in range(1, 20):
        rows = [row for row in range(ROWS) if (row + seed) % 3 or seed % 2]
        tables, wanted = None, []
        for place, numbers in zip(places, (both.draw(ROWS, seed + 100 * step) for step in range(STEPS)), strict=True):
            copy_inputs(numbers, place)
            first = numbers.of(slice(len(rows)))
            tokens, tables = both.lay_out(dict.fromkeys(rows, 1), dict.fromkeys(rows[: seed % 4], 1))
            wanted.append(both.expected(tokens, tables, first))
        assert tables is not None
        for table in (slots, kept):
            table.fill_(-1)
        slots[: len(rows)] = torch.from_numpy(tables.slot_mapping).cuda()
        kept[: seed % 4] = torch.from_numpy(tables.writes.pages).cuda()
        graph.replay()
        for ours, theirs in zip(outputs, wanted, strict=True):
            both.check(ours[: len(rows)], theirs)
            assert not ours[len(rows) :].any()
    both.check_states()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@torch.inference_mode()
def test_a_graph_computes_verify_steps_that_are_taken_back(shape: StateShape, dtype: torch.dtype) -> None:
    """Computes all layers for up to six tokens of each of four sequences. Any number of drafts is accepted. The
    first sequence leaves snapshots, and the last takes part in every other step only."""
    both, sequences = Both(shape, dtype), 4
    tokens, tables = both.lay_out({row: 3 + row for row in range(sequences)})
    layers = [both.draw(int(tokens.qo_indptr[-1]), 99 + layer) for layer in range(LAYERS)]
    both.expected_of(layers, tokens, tables)
    plan = GroupPlan(both.kernels.plan(tokens, tables), None)
    for layer, x in enumerate(layers):
        both.kernels.run(plan, layer, x)
    size = 6 * sequences
    slots, behind, kept, preceding, rest = (torch.zeros(size, dtype=torch.int32, device="cuda") for _ in range(5))
    slots.fill_(-1)
    static = DeviceTables(slots, rest, behind, rest, preceding=preceding, kept=kept.fill_(-1))
    own = both.kernels.buffers(Limits.of_verification(size, 4, 1), static)
    places = [both.draw(size, 0) for _ in range(LAYERS)]
    graph, outputs = capture(own, places, range(LAYERS))
    befores = both.pages[sequences : 2 * sequences, 0]
    for seed in range(12):
        counts = {row: 1 + (row + seed) % 6 for row in range(sequences - seed % 2)}
        tokens, tables = both.lay_out(counts, {0: counts[0]})
        pages = tables.kv_indices
        for one in (both.reference, both.kernels):
            one.copy_pages(pages, befores[: pages.size])
        total, apart, writes = int(tokens.qo_indptr[-1]), tokens.apart(), tables.writes.apart(tokens)
        layers = [both.draw(size, 100 * seed + layer) for layer in range(LAYERS)]
        for place, x in zip(places, layers, strict=True):
            copy_inputs(x, place)
        assert apart.preceding is not None
        for table, padding, numbers in (
            (slots, -1, pages[tokens.owners]),
            (behind, 1, np.ones(total, np.int32)),
            (preceding, 0, apart.preceding),
        ):
            table.fill_(padding)
            table[:total] = torch.from_numpy(numbers).cuda()
        kept.fill_(-1)
        kept[torch.from_numpy(writes.sequences).cuda()] = torch.from_numpy(writes.pages.astype(np.int32)).cuda()
        own.plan(apart, tables)
        graph.replay()
        wanted = both.expected_of([x.of(slice(total)) for x in layers], tokens, replace(tables, drafted=True))
        for ours, theirs in zip(outputs, wanted, strict=True):
            both.check(ours[:total], theirs)
            assert not ours[total:].any()
        for place, (row, count) in enumerate(counts.items()):
            held = 1 + (seed + 2 * row) % count
            if held < count:
                for one in (both.reference, both.kernels):
                    one.compute_again(place, held, int(befores[place]), int(pages[place]))
                both.lengths[row] -= count - held
        written = [*both.pages[:sequences, 0].tolist(), *sorted(both.kept)]
        both.check(both.kernels._pool.flatten(2)[written], both.reference._entries[written])


def copy_inputs(source: RecurrentInputs, target: RecurrentInputs) -> None:
    for of_source, of_target in zip(source, target, strict=True):
        if of_source is not None:
            assert of_target is not None
            of_target.copy_(of_source)


def capture(
    own: DeltaSteps | DeltaRuns, places: Sequence[RecurrentInputs], layers: Sequence[int] | None = None
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The graph of as many steps of a layer, or of a step of several layers, and what they give."""
    of_each = [LAYER] * len(places) if layers is None else layers

    def compute() -> list[Tensor]:
        plan = GroupPlan(own, None, captured=True)
        return [own.run(plan, layer, place) for layer, place in zip(of_each, places, strict=True)]

    compute()  # of rows of padding alone
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    return graph, outputs


@pytest.mark.parametrize("family", KEEP_STATES)
def test_float32_tokens_equal_transformers_wherever_prompts_are_cut(family: str, tmp_path: Path) -> None:
    """Prompts end around a chunk; then all are stepped at once."""
    make_model(family).save_pretrained(tmp_path)
    prompts = {cut: random_prompt(2 * cut + 1, seed=cut) for cut in CUT_AT}
    expected = greedy_all(load_oracle(tmp_path, device="cuda"), list(prompts.values()), 9)
    model = CachedModel(tmp_path, "float32", "cuda")
    made = []
    for cut, prompt in prompts.items():
        model.cache.add_sequence(cut)
        made.append(model.sample(model.feed(cut, prompt, [cut])))
    for _ in range(8):
        step = {cut: tokens[-1:] for cut, tokens in zip(prompts, made, strict=True)}
        for tokens, token in zip(made, model.sample(model.step(step)), strict=True):
            tokens.append(token)
    assert made == expected


@pytest.mark.parametrize("family", KEEP_STATES)
def test_float32_tokens_equal_transformers_from_snapshots(family: str, tmp_path: Path) -> None:
    """Sequences begin after a prefix, a fork and a pop that end at a snapshot, within a prompt and after a step."""
    make_model(family).save_pretrained(tmp_path)
    prompt, other = random_prompt(150, 1), random_prompt(40, 2)
    texts = [prompt, prompt[:100] + other, prompt[:32] + other]
    expected = greedy_all(load_oracle(tmp_path, device="cuda"), texts, 12)
    model = CachedModel(tmp_path, "float32", "cuda", SnapshotRule(32, 20))
    model.cache.add_sequence(0)
    made = model.generate(0, model.feed(0, prompt, [70]), 12)
    assert made == expected[0]
    model.cache.publish_prefix(0, np.array(prompt + made[:-1]))
    for sequence, (text, found) in enumerate(zip(texts, (128, 96, 32), strict=True), 1):
        model.cache.add_sequence(sequence)
        assert model.cache.match_prefix(sequence, np.array(text)) == found
        assert model.generate(sequence, model.feed(sequence, text, []), 12) == expected[sequence - 1]
    model.cache.fork_sequence(0, 4, 160)
    assert model.generate(4, model.step({4: made[10:11]}), 1) == made[11:]
    model.cache.pop(0, model.cache.num_tokens(0) - 96)
    assert model.generate(0, model.feed(0, texts[1], []), 12) == expected[1]


@pytest.mark.parametrize("family", KEEP_STATES)
def test_a_models_graphs_go_on_as_its_eager_steps(family: str, tmp_path: Path) -> None:
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    for params in (GREEDY, DRAWN):
        assert_graphs_go_on(tmp_path, params, PROGRAM, FLOAT16_LOGPROB)
