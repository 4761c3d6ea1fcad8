"""A model of any family with random weights over a cache of random KV, on a GPU or a CPU: its steps and prompts, timed.

On a CPU decode steps take the path of CUDA graphs, too: what a graph would hold is computed anew.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.pool_sizes import PageUse, pages_of_groups
from tandem.cache.plan.shard import Shard
from tandem.workers.config import AdapterSettings
from tandem.workers.models.registry import load_config
from tandem.workers.models.sharding import shard_config
from tandem.workers.models.weights import NO_ADAPTERS, load_decoder
from tandem.workers.ranks.ranks import ALONE, Ranks
from tandem.workers.runner.forward_graphs import GraphCapture, Replay
from tandem.workers.runner.model_cache import kv_layout, make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.benchmarks.compressed_shapes import Fields
from tests.benchmarks.contexts import Lengths
from tests.benchmarks.device_time import measure_copy
from tests.benchmarks.measured import Measured
from tests.benchmarks.step_bench import (
    PAGE_SIZE,
    SEGMENT,
    STEPS,
    WARM_STEPS,
    compute_prompt,
    random_pool,
    step_times,
)
from tests.support.adapters import held_adapters, random_adapters
from tests.support.tvm_cache import TvmCache
from tests.support.whole_prompts import compute_prompts

DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
GREEDY = SamplingParams(temperature=0)
CPU_RUNS = 3
CPU_COPY_BYTES = 64 << 20
AHEAD = STEPS + WARM_STEPS + 2 * PAGE_SIZE  # positions behind a context that its steps may reach


class ModelBench:
    """A model with any layout that kv_layout() makes."""

    def __init__(
        self,
        fields: Fields,
        device: str,
        *,
        sequences: int,
        length: int,
        chunk: int,
        positions: int | None = None,
        ranks: Ranks = ALONE,
        adapters: AdapterSettings = NO_ADAPTERS,
    ) -> None:
        """fields: config.json. The cache holds so many sequences of up to `length` positions and AHEAD, and forwards
        append up to `chunk` of these to one.

        positions: of all sequences together; None: `sequences` of them in full length. ranks: the model and the cache
        are the shard of this rank, and all ranks make the same calls in the same order. adapters: for which the model
        has slots; self.adapters and self.digests are as many random ones.
        """
        self.device = torch.device(device)
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder)
            (model / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            self.config = shard_config(load_config(model, DTYPES[device]), Shard(ranks.rank, ranks.size))
            where: Any = {"device": device, "ranks": ranks, "adapters": adapters}
            decoder = load_decoder(model, self.config, load_format="dummy", **where)
            self.adapters, self.digests = None, list[bytes]()
            if (weights := decoder.adapted) is not None:
                folders = random_adapters(weights, model, adapters.max_resident)
                self.adapters, self.digests = held_adapters(self.config, weights, folders)
        layout = kv_layout(self.config, PAGE_SIZE)
        longest = -(-(length + AHEAD) // layout.grain) * layout.grain
        use = PageUse(sequences, longest, chunk)
        num_pages = -(-(sequences * longest if positions is None else positions) // PAGE_SIZE)
        counts = pages_of_groups(layout, num_pages, [use])
        pools = [
            random_pool((count, *layout.page_shape(group)), layout.stored_dtype_of(group), device)
            for group, count in enumerate(counts)
        ]
        self.pool_bytes = sum(pool.nbytes for pool in pools)
        self.cache = TvmCache.of(
            make_cache(self.config, layout, pools, max_sequences=sequences + 1, max_length=longest)
        )
        self.runner = ModelRunner(decoder, self.cache, self.adapters)

    def capture_steps(self, rows: int) -> float:
        """Seconds that it takes to capture decode steps of up to so many rows."""
        began = time.perf_counter()
        self.runner.capture_steps(rows, None if self.device.type == "cuda" else repeated)
        synchronize(self.device)
        assert self.runner.overlaps, "no decode step was captured"
        return time.perf_counter() - began

    @contextmanager
    def stored(self, lengths: Lengths) -> Iterator[tuple[int, ...]]:
        """Sequences that have stored so many positions each, int64 [rows]: the noise of the pools."""
        ids, added = tuple(range(lengths.size)), list[int]()
        try:
            for sequence in ids:
                self.cache.add_sequence(sequence)
                added.append(sequence)
                self.cache.prepare_receive(sequence, int(lengths[sequence]))
                self.cache.finish_receive(sequence)
            yield ids
        finally:
            synchronize(self.device)
            for sequence in added:
                self.cache.remove_sequence(sequence)

    def decode(self, contexts: Lengths) -> Measured:
        """Seconds of a step, the mean of STEPS. contexts: int64 [rows], stored before the middle one."""
        sampling, first = SampleBatch.from_params([GREEDY] * contexts.size), contexts - WARM_STEPS - STEPS // 2
        with self.stored(first) as ids:
            step_times(self.runner, ids, sampling, first, WARM_STEPS)
            times = step_times(self.runner, ids, sampling, first + WARM_STEPS, STEPS)
        segments = [(end - begin) / SEGMENT for begin, end in pairwise(times[::SEGMENT])]
        return Measured.of((times[-1] - times[0]) / STEPS, segments)

    def step_once(self, ids: tuple[int, ...]) -> None:
        """One more token for each."""
        sampling = SampleBatch.from_params([GREEDY] * len(ids))
        positions = np.array([self.cache.num_tokens(sequence) for sequence in ids])
        step_times(self.runner, ids, sampling, positions, 1)

    def prefill(self, length: int, chunk: int, rounds: int) -> Measured:
        """Seconds to the first token of a prompt of so many tokens, median of `rounds` after one."""
        return Measured.median([self.prompt(length, chunk) for _ in range(rounds + 1)][1:])

    def prompt(self, length: int, chunk: int) -> float:
        """first_token() of a prompt of so many tokens."""
        return self.first_token(np.random.default_rng(0).integers(0, self.config.vocab_size, length), chunk)

    @contextmanager
    def published(self, tokens: Int64Array, chunk: int) -> Iterator[None]:
        """Others can share what a sequence computes of these tokens, int64 [n], in so many a forward."""
        self.cache.add_sequence(0)
        try:
            for end in range(0, tokens.size, chunk):
                compute_prompts(self.runner, [0], [tokens[end : end + chunk]], [tokens.size], push=False)
                self.cache.publish_prefix(0, tokens[: end + chunk])
            yield
        finally:
            synchronize(self.device)
            self.cache.remove_sequence(0)

    def first_token(self, tokens: Int64Array, chunk: int, *, matches: bool = False) -> float:
        """Seconds to the first token of a prompt, int64 [n]. matches: what was published of it is shared."""
        synchronize(self.device)
        began = time.perf_counter()
        self.cache.add_sequence(1)
        try:
            done = self.cache.match_prefix(1, tokens) if matches else 0
            assert bool(done) == matches, "no prefix of the prompt is cached"
            logits = compute_prompt(self.runner, 1, tokens, chunk, done)
            self.runner.sample(logits, SampleBatch.from_params([GREEDY]), np.array([tokens.size]))
            return time.perf_counter() - began
        finally:
            self.cache.remove_sequence(1)


def repeated(compute: Callable[[], Tensor]) -> Replay:
    """A Capture without a GPU: the result is in the same memory each time."""
    memory = compute().clone()
    return lambda: memory.copy_(compute())


def captured(compute: Callable[[], Tensor], device: torch.device) -> Replay:
    """compute() in a CUDA graph of its own; on a CPU, as it is."""
    return GraphCapture()(compute) if device.type == "cuda" else compute


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_rate(device: torch.device) -> float:
    """C."""
    if device.type == "cuda":
        return measure_copy()
    source = torch.zeros(CPU_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * CPU_COPY_BYTES / host_seconds(lambda: target.copy_(source))


def host_seconds(run: Callable[[], object]) -> Measured:
    times = []
    for _ in range(CPU_RUNS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return Measured.median(times)


def release(device: torch.device) -> None:
    """Gives back the memory of what is no longer in use: graphs, weights and pools."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes of device memory used so far; 0 on a CPU, which does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
