"""Tests that the benchmark of workers of several ranks counts correctly, and that it runs on ranks of a CPU."""

import json
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.shard import WHOLE, Shard
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import load_parameters
from tests.benchmarks import packed_weights, rank_bench, rank_steps
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_bench import AHEAD, ModelBench
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.benchmarks.rank_floors import kept_bytes, num_sums, weight_bytes
from tests.support.thread_ranks import ThreadRank, on_all, thread_ranks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
STATES = {
    "full_attention_interval": 3,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 24,
}
TINY: dict[str, dict[str, Any]] = {
    "dense": COMMON | SHAPES["qwen3-8b"] | SIZES,
    "experts": COMMON | SHAPES["qwen3-30b-a3b"] | SIZES | EXPERTS,
    "states": COMMON | SHAPES["qwen3-next-8-layers"] | SIZES | EXPERTS | STATES,
}
ROWS, CONTEXT, PROMPT, CHUNK = 2, 48, 40, 32
MANY = 10_000  # rows that choose every expert


def config_of(fields: dict[str, Any], folder: Path, shard: Shard = WHOLE) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return shard_config(load_config(folder, "bfloat16"), shard)


def sums_of(rank: ThreadRank, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what a rank adds up in a step of ROWS."""
    shapes, add_up = list[tuple[int, ...]](), rank.sum

    def counted(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return add_up(x)

    monkeypatch.setattr(rank, "sum", counted)
    positions = ROWS * (CONTEXT + AHEAD)
    bench = ModelBench(TINY[kind], "cpu", sequences=ROWS, length=CONTEXT, chunk=CHUNK, positions=positions, ranks=rank)
    assert bench.prompt(PROMPT, CHUNK) > 0
    assert bench.decode(np.full(ROWS, CONTEXT)) > 0
    with bench.stored(np.full(ROWS, CONTEXT)) as ids:
        shapes.clear()
        bench.step_once(ids)
    assert len(shapes) == num_sums(bench.config)
    return shapes


@pytest.mark.parametrize("kind", TINY)
def test_ranks_add_up_as_often_as_the_floor_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_all([partial(sums_of, rank, kind, monkeypatch) for rank in thread_ranks(2)])
    assert found[0] == found[1] == [(ROWS, SIZES["hidden_size"])] * len(found[0])


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=["whole", "half"])
@pytest.mark.parametrize("kind", TINY)
def test_a_step_of_many_rows_reads_all_matrices_of_the_shard(kind: str, shard: Shard, tmp_path: Path) -> None:
    config = config_of(TINY[kind], tmp_path, shard)
    weights = named_weights(config, load_parameters(tmp_path, config, load_format="dummy"))
    matrices = [one for name, one in weights.items() if one.dim() > 1 and "embed_tokens" not in name]
    assert weight_bytes(config, MANY) == pytest.approx(sum(one.nbytes for one in matrices))


def test_a_step_of_one_row_reads_the_experts_that_it_chooses(tmp_path: Path) -> None:
    config = config_of(TINY["experts"], tmp_path, Shard(0, 2))
    expert = 3 * SIZES["hidden_size"] * EXPERTS["moe_intermediate_size"] * 2
    unread = weight_bytes(config, MANY) - weight_bytes(config, 1)
    assert unread == pytest.approx(SIZES["num_hidden_layers"] * (3 - 1) * expert)  # one of two choices is held here


def test_states_are_read_and_written_and_are_no_kv(tmp_path: Path) -> None:
    config, lengths = config_of(TINY["states"], tmp_path, Shard(0, 2)), np.array([10, 30])
    entry = 3 * (2 * 8 + 2 * 16) + 2 * 8 * 16  # one key head and two value heads: the tail, then their states
    kv = 2 * 1 * 16 * (10 + 1 + 30 + 1) * 2  # of one layer, whose only KV head of this rank has 16 numbers
    assert kept_bytes(config, lengths) == 2 * 2 * 2 * entry * 4 + kv


@pytest.mark.parametrize("rows", [1, 64])
def test_experts_in_4_bits_are_counted_as_the_packed_benchmark_does(rows: int, tmp_path: Path) -> None:
    fields = rank_bench.MODELS["gpt-oss-120b"]
    assert weight_bytes(config_of(fields, tmp_path), rows) == pytest.approx(
        packed_weights.weight_bytes(fields, rows), rel=0.02
    )


class ThreadRankBench(rank_bench.RankBench):
    """A rank that is a thread of this process, on a CPU."""

    def __init__(self, rank: ThreadRank) -> None:
        self.ranks, self._size = rank, rank.size  # type: ignore[assignment]

    def seconds_each(self, num_bytes: int, count: int, repeats: int) -> float:
        return 1e-4


class ThreadProcess:
    """A PeProcess that is a thread."""

    def __init__(self, bench: ThreadRankBench, pool: ThreadPoolExecutor) -> None:
        self._bench, self._pool = bench, pool

    def begin(self, method: str, *arguments: Any) -> None:
        self._answer = self._pool.submit(getattr(self._bench, method), *arguments)

    def finish(self) -> Any:
        return self._answer.result()


@contextmanager
def thread_processes(count: int, kind: Any) -> Iterator[list[ThreadProcess]]:
    with ThreadPoolExecutor(count) as pool:
        yield [ThreadProcess(ThreadRankBench(rank), pool) for rank in thread_ranks(count)]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpu_bench(fields: dict[str, Any], device: str, **sizes: Any) -> ModelBench:
        return ModelBench(fields, "cpu", **sizes)

    monkeypatch.setattr(rank_bench, "ModelBench", cpu_bench)
    monkeypatch.setattr(ModelBench, "capture_steps", lambda self, rows: 0.0)
    monkeypatch.setattr(rank_steps, "pe_processes", thread_processes)
    monkeypatch.setattr(rank_steps, "meeting", lambda ranks, slot_bytes: nullcontext())
    monkeypatch.setattr(rank_steps, "measure_copy", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setitem(rank_bench.MODELS, "tiny", TINY["dense"])
    monkeypatch.setitem(rank_bench.MODELS, "undivided", TINY["dense"] | {"intermediate_size": 97})


@pytest.mark.usefixtures("on_a_cpu")
def test_each_number_of_ranks_is_measured_and_errors_stay_with_theirs() -> None:
    chosen = {"model": ["tiny", "undivided"], "ranks": [1, 2], "rows": [1, 2], "context": 40, "prompt": 48}
    options = Namespace(**chosen, profile=False, seconds=None)
    result = rank_steps.measure(options)
    alone, both = result["tiny"]["1 rank"], result["tiny"]["2 ranks"]
    assert set(both) == set(alone) == {"start", "decode 1", "decode 2", "prefill 48"}
    assert alone["decode 2"]["sums_ms"] == alone["prefill 48"]["sums_ms"] == 0
    assert both["decode 2"]["sums_ms"] == both["prefill 48"]["sums_ms"] == pytest.approx(0.6)  # two in three layers
    assert all("to_one_rank" in both[title] for title in ("decode 1", "decode 2", "prefill 48"))
    assert "error" not in result["undivided"]["1 rank"]
    assert "intermediate_size is 97" in result["undivided"]["2 ranks"]["error"]


def test_targets_are_those_of_what_was_measured() -> None:
    def numbers(milliseconds: float) -> dict[str, Any]:
        measured = Measured.median([milliseconds])
        return {"ms": measured, "to_floor": measured.scaled(0.5)}

    results = {
        1: {"start": {"load_s": 1.0}, "decode 64": numbers(4.0), "prefill 8192": numbers(200.0)},
        2: {"decode 1": numbers(2.0), "decode 64": numbers(3.0), "prefill 8192": numbers(110.0)},
        4: {"decode 1": numbers(1.0), "error": "RuntimeError: decode 64 ran into something"},
        8: {"decode 1": numbers(1.0)},
    }
    rank_steps.compare(results)
    found = {one["name"]: (one["value"], one["at_most"]) for one in rank_steps.targets_of(results)}
    assert found == {
        "qwen3-8b, 2 ranks, decode of 1 ÷ floor": (1.0, 1.2),
        "qwen3-8b, 2 ranks, decode of 64 ÷ floor": (1.5, 1.2),
        "qwen3-8b, 2 ranks, prefill of 8192 ÷ one rank's": (0.55, 0.58),
        "qwen3-8b, 4 ranks, decode of 1 ÷ floor": (0.5, 1.3),
    }
