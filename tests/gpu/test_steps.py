"""Decode steps in CUDA graphs against the eager path: batches that grow, shrink and cross buckets, step after step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.workers.kernels.decode_megakernel.megakernel import ROW_COUNTS, MegakernelArguments, MegakernelLaunch
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.sharing_kernels import sharing_all
from tests.support.checkpoints import make_model, sizes_on_gpu
from tests.support.oracle import random_prompt
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
NUM_SEQUENCES = 20
# How many of the sequences, from the first, are stepped.
PROGRAM = (1, 2, 3, 4, 5, 9, 16, 17, 20, 8, 7, 1, 2, 20, 12)
GREEDY = SamplingParams(temperature=0, logprobs=3)
DRAWN = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, logprobs=3)

WIDE = {
    "hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 600,
}  # fmt: skip
SCALES = KVScales(((0.01,), (0.02, 0.015)), ((0.02,), (0.01, 0.03)))  # of two layers with two KV heads
MOSTLY = 0.95  # of the tokens are the same
FLOAT16_LOGPROB = 0.03
WIDE_LOGPROB = 0.2  # transformers' own, float16 to float32, are off by up to 0.09 for such models
FP8_LOGPROB = 0.1  # what is rounded a little differently may become the neighbouring entry

Drawn = dict[int, tuple[int, dict[int, float]]]
"""By sequence the token and the best log-probabilities of one step."""


class Steps:
    """One model and cache, with prompts of unlike lengths stored."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        graphs: bool,
        scales: KVScales | None = None,
        kernels: KernelFactory = choose_kernels,
        long: int = 0,
    ) -> None:
        """long: more tokens of the first four prompts."""
        config = load_config(folder, dtype)
        layout = kv_layout(config, 16, scales)
        pools = [
            torch.full((200 + 4 * long // 16, *layout.page_shape(group)), torch.nan, device="cuda").to(
                layout.stored_dtype_of(group)
            )
            for group in range(len(layout.groups))
        ]
        self.cache = TvmCache.of(
            make_cache(config, layout, pools, max_sequences=32, max_length=256 + long, kernels=kernels)
        )
        self.runner = ModelRunner(load_decoder(folder, config, device="cuda"), self.cache)
        if graphs:
            self.runner.capture_steps(2 * NUM_SEQUENCES)  # plans of more sizes than are run
        for sequence in range(NUM_SEQUENCES):
            self.cache.add_sequence(sequence)
            prompt = random_prompt(5 + 7 * sequence % 60 + long * (sequence < 4), seed=sequence)
            plan = self.cache.begin_forward([sequence], [len(prompt)])
            self.runner.forward(np.array(prompt), plan, np.zeros(1, np.int64))
            self.cache.end_forward(plan)

    def run(
        self, params: SamplingParams, program: Sequence[int] = PROGRAM, chosen: "list[Drawn] | None" = None
    ) -> "list[Drawn]":
        """Returns the samples of each step. A step is launched before the tokens of the step before are read.

        chosen: the tokens of every step, in place of those drawn.
        """
        tokens = dict.fromkeys(range(NUM_SEQUENCES), 7)
        flights: list[Any] = []
        made: list[Drawn] = []
        for step, count in enumerate(program):
            rows = np.arange(count) if step % 2 else np.arange(count)[::-1].copy()
            if self.runner.overlaps and flights:
                # The input of a row is what the step before draws in its row there, or else the last one known.
                before = {int(sequence): row for row, sequence in enumerate(flights[-1][0])}
                for known in flights[-2:-1]:
                    self._learn(known, tokens, made)
                sources = np.array([before.get(int(sequence), -1) for sequence in rows])
            else:
                sources = np.full(count, -1)
            inputs = np.array([tokens[int(sequence)] for sequence in rows])
            sampling = SampleBatch.from_params([params] * count)
            positions = np.array([self.cache.num_tokens(int(sequence)) + 1 for sequence in rows])
            flights.append((rows, self.runner.step(tuple(rows.tolist()), inputs, sources, sampling, positions)))
            if not self.runner.overlaps:
                self._learn(flights[-1], tokens, made)
                if chosen is not None:
                    tokens.update({sequence: token for sequence, (token, _) in chosen[step].items()})
        if self.runner.overlaps:
            for known in flights[-2:]:
                self._learn(known, tokens, made)
        return made

    def _learn(self, flight: Any, tokens: dict[int, int], made: "list[Drawn]") -> None:
        rows, pending = flight
        samples = pending.wait()
        drawn = zip(samples.token_ids.tolist(), samples.logprobs, strict=True)
        chosen = ((token, dict(one.top) if one is not None else {}) for token, one in drawn)
        made.append(dict(zip(rows.tolist(), chosen, strict=True)))
        tokens.update({sequence: token for sequence, (token, _) in made[-1].items()})


def tokens_of(made: list[Drawn]) -> list[dict[int, int]]:
    return [{sequence: token for sequence, (token, _) in step.items()} for step in made]


def assert_graphs_go_on(
    folder: Path,
    params: SamplingParams,
    program: Sequence[int],
    tolerance: float = FLOAT16_LOGPROB,
    dtype: str = "float16",
    scales: KVScales | None = None,
    long: int = 0,
) -> None:
    """Kernels differ, so near-equals may swap: the eager path goes on with the graphs' tokens, and few may differ."""
    eager, graphs = (Steps(folder, dtype, with_graphs, scales, long=long) for with_graphs in (False, True))
    assert graphs.runner.overlaps
    assert not eager.runner.overlaps
    ours = graphs.run(params, program)
    assert_alike(ours, eager.run(params, program, chosen=ours), tolerance, sum(program))


def assert_alike(ours: list[Drawn], theirs: list[Drawn], tolerance: float, count: int = sum(PROGRAM)) -> None:
    """`count` tokens, the same but for few, and the log-probabilities that both report."""
    pairs = [(mine[sequence], other[sequence]) for mine, other in zip(ours, theirs, strict=True) for sequence in mine]
    assert len(pairs) == count
    assert np.mean([mine[0] == other[0] for mine, other in pairs]) > MOSTLY
    for (_, mine), (_, other) in pairs:
        for token in mine.keys() & other.keys():
            assert mine[token] == pytest.approx(other[token], abs=tolerance)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek_v3", "phi3-head-dim"])
def test_graphs_go_on_as_the_eager_path(family: str, params: SamplingParams, tmp_path: Path) -> None:
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    assert_graphs_go_on(tmp_path, params, PROGRAM)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_that_graphs_post(params: SamplingParams, tmp_path: Path) -> None:
    """Without log-probabilities only the graph's words come to the host."""
    make_model("qwen3", head_dim=128, hidden_size=256).save_pretrained(tmp_path)
    assert_graphs_go_on(tmp_path, replace(params, logprobs=None), PROGRAM, dtype="bfloat16")


@pytest.mark.parametrize(
    ("family", "inner", "head_dim", "scales", "long"),
    [
        ("qwen3", 768, 64, None, 0),
        ("llama", 768, 64, None, 5000),
        ("qwen2", 768, 64, None, 0),
        ("qwen3", 4608, 64, None, 0),
        ("qwen3", 768, 64, SCALES, 0),
        ("llama", 768, 128, SCALES, 5000),
    ],
    ids=lambda value: "8 bits" if value is SCALES else str(value),
)
def test_few_rows_are_one_launch(
    family: str,
    inner: int,
    head_dim: int,
    scales: KVScales | None,
    long: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every multiprocessor has a share of each product of the model. inner: 4608 numbers of eight rows are gathered in
    two pieces. long: of such contexts a warp attends to more positions at once. Their graphs do not cut sequences for
    another kernel."""
    from tandem.cache.kernels.paged import steps  # needs triton

    make_model(
        family, **WIDE, head_dim=head_dim, intermediate_size=inner, max_position_embeddings=8192
    ).save_pretrained(tmp_path)
    captured: set[MegakernelLaunch] = set()
    cut: set[int] = set()  # rows of the graphs that cut sequences
    launch, schedule = MegakernelLaunch.__call__, steps.schedule_splits

    def count(kernel: MegakernelLaunch, arguments: MegakernelArguments) -> None:
        captured.add(kernel)
        launch(kernel, arguments)

    def note(plan: Any, *rest: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            cut.add(plan.tables.slots.shape[0])
        schedule(plan, *rest)

    monkeypatch.setattr(MegakernelLaunch, "__call__", count)
    monkeypatch.setattr(steps, "schedule_splits", note)
    program = (1, 1, 1, 2, 1, 3, 8, 4, 2, 20, 5, 4, 7, 1, 1)
    assert_graphs_go_on(tmp_path, GREEDY, program, WIDE_LOGPROB, scales=scales, long=long)
    assert len(captured) == len(ROW_COUNTS)
    assert cut
    assert cut.isdisjoint(ROW_COUNTS)


def test_graphs_over_kv_in_8_bits(tmp_path: Path) -> None:
    make_model("qwen3", head_dim=128, hidden_size=256).save_pretrained(tmp_path)
    assert_graphs_go_on(tmp_path, GREEDY, PROGRAM, FP8_LOGPROB, scales=SCALES)


def test_float32_steps_are_eager(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    assert not Steps(tmp_path, "float32", graphs=True).runner.overlaps


def test_steps_that_share_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks in the sharing batches' graphs against eager steps; with as many rows as these take."""
    from tandem.cache.kernels.flashinfer.sharing import FixedSharing  # needs triton

    make_model("qwen3", head_dim=64, hidden_size=256).save_pretrained(tmp_path)
    fills: list[int] = []
    fill = FixedSharing.refill

    def refill(sharing: FixedSharing, shared: SharedPrefixes | None, *rest: Any) -> None:
        fills.append(0 if shared is None else shared.members.size)
        fill(sharing, shared, *rest)

    monkeypatch.setattr(FixedSharing, "refill", refill)
    made = []
    for graphs in (False, True):
        steps = Steps(tmp_path, "bfloat16", graphs, kernels=sharing_all(choose_kernels))
        for sequence in set(range(NUM_SEQUENCES)) - {7, 8, 16}:
            steps.cache.remove_sequence(sequence)
            steps.cache.fork_sequence(8, sequence, 48 if sequence % 2 else -1)
        made.append(tokens_of(steps.run(GREEDY, (16, 17, 20, 20, 18, 16))))
    assert made[0] == made[1]
    assert max(fills) >= NUM_SEQUENCES - 3
